"""Small models of images and language, with random weights, and their processors."""

import torch
import transformers

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
