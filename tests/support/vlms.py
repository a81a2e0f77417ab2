"""Small models of images and language, with random weights, and their processors."""

import importlib

import torch
import transformers

from gtp_vit.testing.subject import randomised

SIZES = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
IMAGE = 4  # the placeholder of a feature
VISION = {**SIZES, "image_size": 64, "patch_size": 8}
TEXT = {**SIZES, "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


def siglip():
    return transformers.SiglipVisionConfig(**VISION, vision_use_head=False)


def small(name, vision, text=None, **more):
    """A VLM with random weights; `name` as its classes begin."""
    text = transformers.LlamaConfig(**TEXT) if text is None else text
    config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text, **more)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape)
    return model.eval()


def gemma3():
    text = transformers.Gemma3TextConfig(**{**TEXT, "vocab_size": 60}, num_key_value_heads=1, head_dim=8)
    return small("Gemma3", siglip(), text, image_token_index=IMAGE, mm_tokens_per_image=16)


def llava(layer=-2):
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=64, patch_size=8)
    text = transformers.LlamaConfig(
        **{**SIZES, "hidden_size": 16, "num_hidden_layers": 2}, vocab_size=60, bos_token_id=1, eos_token_id=2
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=4, vision_feature_layer=layer
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def paligemma():
    torch.manual_seed(0)
    vision = transformers.SiglipVisionConfig(**SIZES, image_size=64, patch_size=8, vision_use_head=False)
    text = transformers.GemmaConfig(
        **{**SIZES, "hidden_size": 16},
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=2000,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=4, projection_dim=16
    )
    return transformers.PaliGemmaForConditionalGeneration(config).eval()


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "what", "is", "this", "\n"]
    found = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=found, **special)
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.image_token, made.image_token_id = "<image>", 4
    return made


def llava_processor(side=64, patch_size=8):
    size = {"height": side, "width": side}
    images = transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=size)
    return transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def paligemma_processor(side=64):
    images = transformers.SiglipImageProcessor(size={"height": side, "width": side})
    images.image_seq_length = (side // 8) ** 2
    return transformers.PaliGemmaProcessor(images, tokenizer())


# name -> (transformers.models.THIS, how its classes begin, settings of its tower)
PACKED = {
    "qwen2_vl": ("Qwen2VL", {"embed_dim": 24, "hidden_size": 16, "mlp_ratio": 2}),
    "qwen3_vl": ("Qwen3VL", {"deepstack_visual_indexes": [1, 2]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {"deepstack_visual_indexes": [1, 2]}),
    "qwen3_5": ("Qwen3_5", {}),
    "qwen3_5_moe": ("Qwen3_5Moe", {}),
}
PACKED_SIZES = {"depth": 4, "num_heads": 2, "patch_size": 8, "initializer_range": 0.1}
QWEN3_SIZES = {"hidden_size": 24, "intermediate_size": 48, "out_hidden_size": 16, "num_position_embeddings": 36}


def packed_tower_config(family):
    """Of a small tower that packs images: four layers, patches of 8 x 8 pixels."""
    name, more = PACKED[family]
    own = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    sizes = {**PACKED_SIZES, **(QWEN3_SIZES if family.startswith("qwen3") else {}), **more}
    return getattr(own, f"{name}VisionConfig")(**sizes)


def packed_tower(family):
    """With all weights random."""
    own = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = "Qwen2VisionTransformerPretrainedModel" if family == "qwen2_vl" else f"{PACKED[family][0]}VisionModel"
    return randomised(lambda: getattr(own, name)(packed_tower_config(family)))


def packed_vlm(family):
    """A model of images and language around such a tower; placeholders are IMAGE. Qwen3.5's text model needs two kinds
    of layers."""
    name = PACKED[family][0]
    text = {**SIZES, "hidden_size": 16, "head_dim": 8, "num_key_value_heads": 1, "num_hidden_layers": 2}
    text |= {
        "vocab_size": 60,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }
    if family.startswith("qwen3_5"):
        text["layer_types"] = ["linear_attention", "full_attention"]
    config = getattr(transformers, f"{name}Config")(
        vision_config=packed_tower_config(family).to_dict(),
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=5,
        vision_start_token_id=6,
        vision_end_token_id=7,
        **TOKENS,
    )
    return randomised(lambda: getattr(transformers, f"{name}ForConditionalGeneration")(config))
