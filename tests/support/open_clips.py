"""Small models of open_clip, with random weights."""

SIZES = {"image_size": 64, "layers": 4, "width": 24, "patch_size": 8, "head_width": 12}
TEXT = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
TRUNK = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear", "image_size": 224}


def open_clip_models():
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIP, CustomTextCLIP

    decoder = {**TEXT, "mlp_ratio": 2}
    pooled = {
        **SIZES,
        "attentional_pool": True,
        "attn_pooler_queries": 6,
        "attn_pooler_heads": 2,
        "output_tokens": True,
    }
    yield CLIP(16, SIZES, TEXT), "visual"
    yield CLIP(16, SIZES, TEXT, quick_gelu=True), "visual"
    yield CustomTextCLIP(16, SIZES, TEXT), "visual"
    yield CustomTextCLIP(16, TRUNK, TEXT), "visual.trunk"
    yield CoCa(16, decoder, {**TEXT, "embed_cls": True, "output_tokens": True}, pooled), "visual"
