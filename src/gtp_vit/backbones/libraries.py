"""The libraries of the families: timm, torchvision and open_clip; Hugging Face's is in hf_library.py."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gtp_vit.core.backbone import Library, Transform
from gtp_vit.errors import GTPError, SettingError, UnknownNameError, first_line, short_repr
from gtp_vit.weights import load_weights


class TimmLibrary(Library):
    """timm: its own names, and those with a prefix of timm's, such as hf-hub:."""

    title = "timm"

    def has_model(self, name: str) -> bool:
        import timm

        base = name.split(".", 1)[0]
        return ":" in base or timm.is_model(base)

    def names_with(self, module: str, kind: str) -> list[str]:
        """Names of the models in all modules of timm that use this class of one of them."""
        import timm

        own = getattr(sys.modules.get(f"timm.models.{module}"), kind, None)  # older versions lack some modules
        every = ((name, vars(sys.modules.get(f"timm.models.{name}", torch))) for name in timm.list_modules())
        users = [name for name, contents in every if own is not None and contents.get(kind) is own]
        return list(timm.list_models(module=users)) if users else []

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        import timm

        try:
            with torch.device("meta") if meta else nullcontext():
                model = timm.create_model(name, pretrained=pretrained and checkpoint is None, **sizes).eval()
        except Exception as error:  # timm, the hub and the network raise errors of many classes
            raise GTPError(f"timm cannot create {name!r}: {first_line(error)}") from error
        if checkpoint is not None:
            load_weights(model, checkpoint, name, resizable=hasattr(model, "set_input_size"))
        return model

    def resize(self, model: nn.Module, img_size: int | tuple[int, int]) -> None:
        resize: Any = getattr(model, "set_input_size", None)
        if resize is None:
            raise SettingError(f"timm cannot resample the positions of {type(model).__name__}; remove img_size")
        resize(img_size=img_size if isinstance(img_size, tuple) else (img_size, img_size))

    def create_without_weights(self, name: str) -> nn.Module:
        """With one block: timm makes all blocks of a model alike, and this is about 15 times as fast."""
        import timm

        with torch.device("meta"):
            try:
                return timm.create_model(name, depth=1)
            except (TypeError, AssertionError):  # an entry point that sets its depth itself, or one for each block
                return timm.create_model(name)


class OpenCLIPLibrary(Library):
    """open_clip: the image tower of NAME, or of NAME/TAG with the weights called TAG."""

    title = prefix = "open_clip"

    def names(self) -> list[str]:
        return sorted(_open_clip().list_models())

    def has_model(self, name: str) -> bool:
        return name.partition("/")[0] in self.names()

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        library, (base, _, tag) = _open_clip(), name.partition("/")
        if "num_classes" in sizes:
            raise SettingError(f"open_clip:{base} has no classes; remove num_classes")
        tags = library.list_pretrained_tags_by_model(base)
        if tag and tag not in tags:
            raise UnknownNameError(
                f"open_clip:{base} has no weights called {short_repr(tag)}; there are {', '.join(tags)}"
            )
        if pretrained and not tag:
            raise SettingError(f"say which weights: open_clip:{base}/TAG with one of {', '.join(tags) or 'none'}")
        weights = str(checkpoint) if checkpoint is not None else tag if pretrained else None
        size = sizes.get("img_size")
        try:
            if meta:
                return self._tower_without_weights(library.get_model_config(base), size)
            model = library.create_model(base, weights, load_weights=weights is not None, force_image_size=size)
        except Exception as error:  # open_clip, the hub and the network raise errors of many classes
            raise GTPError(f"open_clip cannot create {name!r}: {first_line(error)}") from error
        return model.get_submodule("visual").eval()

    def _tower_without_weights(self, config: dict[str, Any], img_size: int | None) -> nn.Module:
        """The image tower of a configuration; its text tower, of which the hub may have the sizes, is left out."""
        from open_clip.model import _build_vision_tower

        vision = {**config["vision_cfg"], **({} if img_size is None else {"image_size": img_size})}
        with torch.device("meta"):
            return _build_vision_tower(config["embed_dim"], vision, config.get("quick_gelu", False)).eval()

    def transform(self, name: str, model: nn.Module) -> Transform | None:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        stored: Any = getattr(model, "preprocess_cfg", None)
        return None if stored is None else image_transform_v2(PreprocessCfg(**stored), is_train=False)


@functools.cache
def _open_clip() -> Any:
    try:
        import open_clip
    except ImportError as error:
        raise GTPError("open_clip's models need the library: pip install 'gtp-vit[open_clip]'") from error
    return open_clip


class TorchvisionLibrary(Library):
    """torchvision's vision transformers, with their default weights."""

    title = prefix = "torchvision"

    def names(self) -> list[str]:
        from torchvision.models import list_models

        return list_models(include="vit_*")

    def has_model(self, name: str) -> bool:
        return name in self.names()

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        from torchvision.models import get_model

        renamed = {"img_size": "image_size", "num_classes": "num_classes"}
        try:
            with torch.device("meta") if meta else nullcontext():
                weights = "DEFAULT" if pretrained and checkpoint is None else None
                model = get_model(name, weights=weights, **{renamed[key]: value for key, value in sizes.items()}).eval()
        except Exception as error:  # torchvision and the network raise errors of many classes
            raise GTPError(f"torchvision cannot create {name!r}: {first_line(error)}") from error
        if checkpoint is not None:
            load_weights(model, checkpoint, f"torchvision:{name}")
        return model

    def transform(self, name: str, model: nn.Module) -> Transform | None:
        from torchvision.models import get_model_weights

        return get_model_weights(name).DEFAULT.transforms()


TIMM, OPEN_CLIP, TORCHVISION = TimmLibrary(), OpenCLIPLibrary(), TorchvisionLibrary()
