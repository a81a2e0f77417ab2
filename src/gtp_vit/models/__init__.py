"""Networks that timm does not have, written with timm's seam: forward_features, then forward_head."""
