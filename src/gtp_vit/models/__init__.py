"""Networks that timm does not have, with timm's interface: forward_features, then forward_head."""
