"""Hugging Face's models by name: a folder, or a name on the hub, with the weights and the image processor in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.hf_architectures import set_image_size
from gtp_vit.backbones.host import find_vit
from gtp_vit.core.backbone import Library, Transform
from gtp_vit.errors import GTPError, SettingError, first_line

# Where `from_pretrained` looks for files.
LOOKUP_OPTIONS = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download")
# Hugging Face's models of images and texts: their image part is what commands run.
VISION_ONLY_CLASSES = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


class HuggingFaceLibrary(Library):
    """transformers: a folder, or a name on the hub."""

    title, prefix, has_weights = "Hugging Face", "hf", True

    def has_model(self, name: str) -> bool:
        return True  # what is on the hub cannot be listed

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        own = [*sizes, *(["checkpoint"] if checkpoint is not None else [])]
        if own:
            raise SettingError(f"hf:{name} has its own weights and sizes; remove {' and '.join(own)}")
        if meta:
            config, kind = configured_class(name, VISION_ONLY_CLASSES)
            with torch.device("meta"):
                model = kind(config).eval()
        else:
            model = load_model(name, VISION_ONLY_CLASSES)
        with contextlib.suppress(GTPError):  # without a processor the configuration's size counts
            set_image_size(model, self._image_transform(name).size())
        return model

    def transform(self, name: str, model: nn.Module) -> Transform | None:
        processor, size = self._image_transform(name), find_vit(model).inputs.size
        if processor.size() != size:
            raise GTPError(
                f"the processor of hf:{name} makes images of {processor.size()}, and the model takes {size}; repair "
                "its preprocessor_config.json"
            )
        return processor

    def preprocessing(self, name: str) -> dict[str, Any] | None:
        return self._image_transform(name).preprocessing()

    def _image_transform(self, name: str) -> HFImageTransform:
        library = transformers_library()
        try:
            return HFImageTransform(library.AutoImageProcessor.from_pretrained(name))
        except (OSError, ValueError) as error:
            raise GTPError(
                f"hf:{name} has no usable image preprocessing ({first_line(error)}); add a preprocessor_config.json"
            ) from error

    def public_name(self, name: str) -> str:
        return Path(name).resolve().name if Path(name).is_dir() else name


class HFImageTransform:
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

        shape = self(Image.new("RGB", (600, 500))).shape
        if len(shape) != 3:
            raise GTPError(
                f"{type(self.processor).__name__} packs the patches of all images into one row; prepare images with it "
                "and call the model itself"
            )
        return shape[1], shape[2]

    def preprocessing(self) -> dict[str, Any]:
        """Its settings under timm's names; under its own if timm has no name for one of them."""
        from PIL import Image

        stored = self.processor.to_dict()
        size, crop = stored.get("size") or {}, stored.get("crop_size") or {}
        crops = bool(stored.get("do_center_crop"))
        usual = all(stored.get(key) is not False for key in ("do_resize", "do_rescale", "do_normalize"))
        usual = usual and abs(255 * stored.get("rescale_factor", 1 / 255) - 1) < 1e-6 and "resample" in stored
        settings = {"mean": stored.get("image_mean"), "std": stored.get("image_std")}
        if usual and "height" in size and not crops:
            settings |= {"crop_pct": 1.0, "crop_mode": "squash"}
        elif usual and "shortest_edge" in size and crops and crop.get("height") == crop.get("width"):
            if crop["height"] > size["shortest_edge"]:  # it pads; timm has no word for that
                return {"processor": stored}
            settings |= {"crop_pct": round(crop["height"] / size["shortest_edge"], 6), "crop_mode": "center"}
        else:
            return {"processor": stored}
        return {**settings, "interpolation": Image.Resampling(stored["resample"]).name.lower()}


HUGGING_FACE = HuggingFaceLibrary()


def transformers_library() -> Any:
    """The library, or an error that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise GTPError(
            "Hugging Face models need transformers 5.18 or newer (Python 3.11): pip install 'gtp-vit[hf]'"
        ) from error
    return transformers


def load_model(name: str, replacements: Mapping[str, str] | None = None, **options: Any) -> Any:
    """A Hugging Face model in eval mode, of the class that its configuration names, or that stands `replacements` of
    it.

    Weights that the checkpoint lacks would be random: refused. A pooler without weights is left out.
    """
    config, kind = configured_class(
        name, replacements or {}, **{key: options[key] for key in LOOKUP_OPTIONS if key in options}
    )
    options = {"config": config, **options}
    try:
        with _without_progress_bars():
            model, info = kind.from_pretrained(name, **options, output_loading_info=True)
            if info["missing_keys"] and all(key.startswith("pooler.") for key in info["missing_keys"]):
                model, info = kind.from_pretrained(name, **options, add_pooling_layer=False, output_loading_info=True)
    except Exception as error:  # transformers, safetensors, the hub and the network raise errors of many classes
        raise GTPError(f"transformers cannot load {name!r}: {first_line(error)}") from error
    missing = sorted([*info["missing_keys"], *(str(key[0]) for key in info.get("mismatched_keys", ()))])
    if missing:
        raise GTPError(
            f"the weights of {name!r} lack {missing[0]} and {len(missing) - 1} others of {kind.__name__}, which would "
            "be random; give a whole checkpoint"
        )
    return model.eval()


def configured_class(name: str, replacements: Mapping[str, str], **where: Any) -> tuple[Any, Any]:
    """The configuration in a folder or on the hub, and the class that it names, or that stands `replacements` of
    that."""
    library = transformers_library()
    try:
        config = library.AutoConfig.from_pretrained(name, **where)
    except (OSError, ValueError) as error:
        raise GTPError(f"transformers cannot open {name!r}: {first_line(error)}") from error
    named = config.architectures or []
    known = [cls for cls in named if hasattr(library, replacements.get(cls, cls))]
    if not known:
        listed = ", ".join(named) or "no class"
        raise GTPError(f"the configuration of {name!r} names {listed}, which transformers {library.__version__} lacks")
    if known[0] in replacements:  # the image part of a model of images and texts
        width = getattr(config, "projection_dim", None)
        config = config.vision_config
        if width is not None:
            config.projection_dim = width
    return config, getattr(library, replacements.get(known[0], known[0]))


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Without transformers' progress bars and its list of weights of a text model that are not needed."""
    logging = transformers_library().logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
