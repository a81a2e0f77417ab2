"""Models of other libraries by name: hf:FOLDER_OR_NAME, open_clip:NAME, torchvision:NAME, and how they prepare images.

Each library is optional and imported only when one of its models is named.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gtp_vit.backbones.hf_vit import set_image_size
from gtp_vit.backbones.host import find
from gtp_vit.errors import BadSetting, GTPError, UnknownName, first_line, shown
from gtp_vit.models.pretrained import configured_class, load_model, transformers_library
from gtp_vit.recipes import BESIDE
from gtp_vit.weights import load_weights

Transform = Callable[[Any], Tensor]


class Library(Protocol):
    """Where models come from."""

    has_weights: bool  # does a name mean weights, too?

    def names(self) -> list[str]:
        """Names of its models that may be supported, without the prefix; none if they cannot be listed."""

    def check_name(self, name: str) -> None:
        """Raise UnknownName if the library has no such model, as far as that is known."""
        return

    def create(self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]) -> Any:
        """A model in eval mode; `sizes` may have img_size and num_classes."""

    def transform(self, name: str, model: Any) -> Transform | None:
        """From a picture to a tensor as the model's weights want it; None: as its `inputs.preparation` says."""

    def preparation(self, name: str) -> dict[str, Any] | None:
        """The same in timm's words, for people and other programs; None: the model's own `inputs.preparation`."""
        return None

    def public_name(self, name: str) -> str:
        """The name without a folder of this machine."""
        return name


# Hugging Face's models of images and texts: their image part is what commands run.
IMAGES_ONLY = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


class HuggingFace(Library):
    """transformers: a folder, or a name on the hub."""

    has_weights = True

    def names(self) -> list[str]:
        return []

    def create(self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]) -> Any:
        given = [*sizes, *(["checkpoint"] if checkpoint is not None else [])]
        if given:
            raise BadSetting(f"hf:{name} has its own weights and sizes; leave out {' and '.join(given)}")
        if (Path(name) / BESIDE).is_file():
            warnings.warn(f"{BESIDE} in this folder is not used by itself; give --method {name}/{BESIDE}", stacklevel=2)
        if meta:
            config, kind = configured_class(name, IMAGES_ONLY)
            with torch.device("meta"):
                model = kind(config).eval()
        else:
            model = load_model(name, IMAGES_ONLY)
        with contextlib.suppress(GTPError):  # without a processor the configuration's size counts
            set_image_size(model, self._processed(name).size())
        return model

    def transform(self, name: str, model: Any) -> Transform | None:
        found, wanted = self._processed(name), find(model).inputs.size
        if found.size() != wanted:
            raise GTPError(
                f"the processor of hf:{name} makes images of {found.size()}, and the model takes {wanted}; repair its "
                "preprocessor_config.json"
            )
        return found

    def preparation(self, name: str) -> dict[str, Any] | None:
        return self._processed(name).in_words()

    def _processed(self, name: str) -> Processed:
        library = transformers_library()
        try:
            return Processed(library.AutoImageProcessor.from_pretrained(name))
        except (OSError, ValueError) as error:
            raise GTPError(
                f"hf:{name} says not how images are prepared ({first_line(error)}); add its preprocessor_config.json"
            ) from error

    def public_name(self, name: str) -> str:
        return Path(name).resolve().name if Path(name).is_dir() else name


class Processed:
    """A Hugging Face image processor as a transform of one picture."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, picture: Any) -> Tensor:
        return self.processor(picture.convert("RGB"), return_tensors="pt")["pixel_values"][0]

    def __repr__(self) -> str:
        return f"{type(self.processor).__name__}({self.processor.to_dict()})"

    def size(self) -> tuple[int, int]:
        """Height and width of what it makes, of a picture that is not square."""
        from PIL import Image

        height, width = self(Image.new("RGB", (600, 500))).shape[1:]
        return height, width

    def in_words(self) -> dict[str, Any]:
        """What it does, as timm calls it; as it is, if timm has no words for all of it."""
        from PIL import Image

        stored = self.processor.to_dict()
        size, crop = stored.get("size") or {}, stored.get("crop_size") or {}
        crops = bool(stored.get("do_center_crop"))
        usual = all(stored.get(key) is not False for key in ("do_resize", "do_rescale", "do_normalize"))
        usual = usual and abs(255 * stored.get("rescale_factor", 1 / 255) - 1) < 1e-6 and "resample" in stored
        found = {"mean": stored.get("image_mean"), "std": stored.get("image_std")}
        if usual and "height" in size and not crops:
            found |= {"crop_pct": 1.0, "crop_mode": "squash"}
        elif usual and "shortest_edge" in size and crops and crop.get("height") == crop.get("width"):
            if crop["height"] > size["shortest_edge"]:  # it pads; timm has no word for that
                return {"processor": stored}
            found |= {"crop_pct": round(crop["height"] / size["shortest_edge"], 6), "crop_mode": "center"}
        else:
            return {"processor": stored}
        return {**found, "interpolation": Image.Resampling(stored["resample"]).name.lower()}


class OpenCLIP(Library):
    """open_clip: the image tower of NAME, or of NAME/TAG with the weights called TAG."""

    has_weights = False

    def names(self) -> list[str]:
        return sorted(_open_clip().list_models())

    def check_name(self, name: str) -> None:
        base, _ = _tag(name)
        if base not in self.names():
            raise UnknownName(f"unknown model open_clip:{shown(base)[1:-1]}; gtp-vit models 'open_clip:*' lists all")

    def create(self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]) -> Any:
        self.check_name(name)
        library, (base, tag) = _open_clip(), _tag(name)
        if "num_classes" in sizes:
            raise BadSetting(f"open_clip:{base} has no classes; leave out num_classes")
        tags = library.list_pretrained_tags_by_model(base)
        if tag and tag not in tags:
            raise UnknownName(f"open_clip:{base} has no weights called {shown(tag)}; there are {', '.join(tags)}")
        if pretrained and not tag:
            raise BadSetting(f"say which weights: open_clip:{base}/TAG with one of {', '.join(tags) or 'none'}")
        weights = str(checkpoint) if checkpoint is not None else tag if pretrained else None
        size = sizes.get("img_size")
        try:
            if meta:
                return _tower_without_weights(library.get_model_config(base), size)
            model = library.create_model(base, weights, load_weights=weights is not None, force_image_size=size)
        except Exception as error:  # open_clip, the hub and the network raise errors of many classes
            raise GTPError(f"open_clip cannot create {name!r}: {first_line(error)}") from error
        return model.get_submodule("visual").eval()

    def transform(self, name: str, model: Any) -> Transform | None:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        stored = getattr(model, "preprocess_cfg", None)
        return None if stored is None else image_transform_v2(PreprocessCfg(**stored), is_train=False)


class Torchvision(Library):
    """torchvision's vision transformers, with their default weights."""

    has_weights = False

    def names(self) -> list[str]:
        from torchvision.models import list_models

        return list_models(include="vit_*")

    def check_name(self, name: str) -> None:
        if name not in self.names():
            raise UnknownName(f"unknown model torchvision:{name}; there are {', '.join(self.names())}")

    def create(self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]) -> Any:
        from torchvision.models import get_model

        self.check_name(name)
        renamed = {"img_size": "image_size", "num_classes": "num_classes"}
        own = {renamed[key]: value for key, value in sizes.items()}
        try:
            with torch.device("meta") if meta else nullcontext():
                weights = "DEFAULT" if pretrained and checkpoint is None else None
                model = get_model(name, weights=weights, **own).eval()
        except Exception as error:  # torchvision and the network raise errors of many classes
            raise GTPError(f"torchvision cannot create {name!r}: {first_line(error)}") from error
        if checkpoint is not None:
            load_weights(model, checkpoint, f"torchvision:{name}")
        return model

    def transform(self, name: str, model: Any) -> Transform | None:
        from torchvision.models import get_model_weights

        return get_model_weights(name).DEFAULT.transforms()


LIBRARIES: dict[str, Library] = {"hf": HuggingFace(), "open_clip": OpenCLIP(), "torchvision": Torchvision()}


def library_of(name: str) -> tuple[Library, str] | None:
    """The library that a prefix names, and the rest of the name; None for timm's models and ours."""
    prefix, colon, rest = name.partition(":")
    return (LIBRARIES[prefix], rest) if colon and prefix in LIBRARIES else None


def listed() -> list[str]:
    """Names with their prefixes of all models that the libraries here can list."""
    found = []
    for prefix, library in LIBRARIES.items():
        try:
            found += [f"{prefix}:{name}" for name in library.names()]
        except GTPError:  # it is not installed
            continue
    return found


def transform_of(name: str, model: Any) -> Transform | None:
    """How a model of another library prepares pictures; None: as its `inputs.preparation` says."""
    found = library_of(name)
    return None if found is None else found[0].transform(found[1], model)


def public_name(name: str) -> str:
    """The name of a model without a folder of this machine, for files that others read."""
    found = library_of(name)
    return name if found is None else f"{name.partition(':')[0]}:{found[0].public_name(found[1])}"


def preparation_of(name: str) -> dict[str, Any] | None:
    """How a model of another library prepares pictures, in timm's words; None: as its `inputs.preparation` says."""
    found = library_of(name)
    return None if found is None else found[0].preparation(found[1])


def _tower_without_weights(config: dict[str, Any], img_size: int | None) -> Any:
    """The image tower of a configuration; its text tower, of which the hub may have the sizes, is left out."""
    from open_clip.model import _build_vision_tower

    size = {} if img_size is None else {"image_size": img_size}
    with torch.device("meta"):
        vision = {**config["vision_cfg"], **size}
        return _build_vision_tower(config["embed_dim"], vision, config.get("quick_gelu", False)).eval()


def _tag(name: str) -> tuple[str, str]:
    base, _, tag = name.partition("/")
    return base, tag


@functools.cache
def _open_clip() -> Any:
    try:
        import open_clip
    except ImportError as error:
        raise GTPError("open_clip's models need the library: pip install 'gtp-vit[open_clip]'") from error
    return open_clip
