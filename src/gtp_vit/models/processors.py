"""adapt_processor: a VLM's processor writes as many placeholders as its reduced ViT has features."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from gtp_vit.backbones.host import Host
from gtp_vit.errors import SettingError, short_repr
from gtp_vit.patching import host_of, is_patched, tower_of

Processor = TypeVar("Processor")


def adapt_processor(processor: Processor, fast: nn.Module) -> Processor:
    """A copy of a LLaVA's or PaliGemma's processor with as many image placeholders as the patched model needs.

    Args:
        processor: the model's LlavaProcessor or PaliGemmaProcessor; it is not changed.
        fast: the patched model.

    Returns:
        The copy, for prompts to the patched model.

    Raises:
        GTPError: the model is not patched, keeps a different number of tokens in each image, or belongs to another
            processor.

    >>> inputs = adapt_processor(processor, fast)(images=image, text=prompt)  # doctest: +SKIP
    """
    if not is_patched(fast):
        raise SettingError(f"{type(fast).__name__} is not patched, and needs no other processor; patch it first")
    tower = tower_of(fast)
    restores = tower.reduction.restore
    if tower.reducer.adaptive and not restores:
        raise SettingError(
            f"{tower.reduction.method.name} keeps a different number of tokens in every image, and a prompt has fixed "
            "placeholders; give it a budget, or use gtp_plus"
        )
    vit = tower.reduction.vit
    # With restore the language model sees as many features as ever.
    left = vit.image_tokens if restores else tower.reducer.steps(vit.grid)[-1].out
    adapted: Any = copy.copy(processor)
    model, kind = type(fast).__name__, type(processor).__name__
    if model.startswith(("Llava", "VipLlava")) and kind == "LlavaProcessor":
        images = adapted.image_processor
        size = images.crop_size if getattr(images, "do_center_crop", False) else images.size
        _check_sizes(host_of(fast), size, processor.patch_size)  # type: ignore[attr-defined]
        _check_strategy(processor, fast)
        adapted.num_additional_image_tokens = vit.prefix - (vit.image_tokens - left)
        return adapted
    if model.startswith("PaliGemma") and kind == "PaliGemmaProcessor":
        _check_sizes(host_of(fast), adapted.image_processor.size, None)
        adapted.image_seq_length = left
        return adapted
    if restores and _is_processor(processor):
        own = _processor_of(fast)
        if own is not None and own not in {cls.__name__ for cls in type(processor).__mro__}:
            raise SettingError(f"{kind} does not belong to {model}; give the processor of this model, {own}")
        return adapted
    raise SettingError(
        f"{kind} does not belong to {model}; adapt_processor takes a LlavaProcessor for LLaVA, a PaliGemmaProcessor "
        "for PaliGemma"
    )


def _is_processor(processor: object) -> bool:
    from transformers import ProcessorMixin

    return isinstance(processor, ProcessorMixin)


def _processor_of(model: Any) -> str | None:
    """The class of processor that transformers has for a model, if it knows one."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names: Any = PROCESSOR_MAPPING_NAMES.get(model.config.model_type)
    return str(names) if names else None


def _check_strategy(processor: Any, model: Any) -> None:
    """Do both leave the class token out, or neither?"""
    theirs, own = processor.vision_feature_select_strategy, model.config.vision_feature_select_strategy
    if theirs != own:
        raise SettingError(
            f"the processor's vision_feature_select_strategy is {short_repr(theirs)}, the model's {short_repr(own)}; "
            "give the processor of this model"
        )


def _check_sizes(host: Host, size: Any, patch: int | None) -> None:
    """Is this the processor of this model?"""
    image_size = (size.get("height"), size.get("width"))
    if image_size != host.inputs.size or (patch is not None and (patch, patch) != host.inputs.patch):
        patches = "" if patch is None else f" in patches of {patch}"
        raise SettingError(
            f"the processor makes images of {short_repr(image_size)}{patches}, and the ViT takes {host.inputs.size} in "
            f"patches of {host.inputs.patch}; give the processor of this model"
        )
