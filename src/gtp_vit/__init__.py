"""gtp-vit: make a pre-trained Vision Transformer faster in one call, without finetuning.

Names are imported when they are used: `gtp_vit.patch` needs torch and what patches, and nothing of training or engines.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gtp_vit.version import __version__ as __version__

if TYPE_CHECKING:
    from gtp_vit.core.reducer import Method as Method
    from gtp_vit.embeddings.embed import PictureFolder as PictureFolder
    from gtp_vit.embeddings.embed import embed as embed
    from gtp_vit.embeddings.manifest import read_embeddings as read_embeddings
    from gtp_vit.engines.export import export as export
    from gtp_vit.errors import GTPError as GTPError
    from gtp_vit.errors import UnsupportedModelError as UnsupportedModelError
    from gtp_vit.methods import METHODS as METHODS
    from gtp_vit.methods import make_method as make_method
    from gtp_vit.methods import method_from_dict as method_from_dict
    from gtp_vit.methods.atc import ATC as ATC
    from gtp_vit.methods.ats import ATS as ATS
    from gtp_vit.methods.diffrate import DiffRate as DiffRate
    from gtp_vit.methods.dynamicvit import DynamicViT as DynamicViT
    from gtp_vit.methods.evit import EViT as EViT
    from gtp_vit.methods.evovit import EvoViT as EvoViT
    from gtp_vit.methods.gtp import GTP as GTP
    from gtp_vit.methods.gtp_plus.learning.calibrate import calibrate as calibrate
    from gtp_vit.methods.gtp_plus.method import GTPPlus as GTPPlus
    from gtp_vit.methods.identity import Identity as Identity
    from gtp_vit.methods.mctf import MCTF as MCTF
    from gtp_vit.methods.pitome import PiToMe as PiToMe
    from gtp_vit.methods.ppt import PPT as PPT
    from gtp_vit.methods.tofu import ToFu as ToFu
    from gtp_vit.methods.tome import ToMe as ToMe
    from gtp_vit.methods.trilevel import TriLevel as TriLevel
    from gtp_vit.models.checkpoint import save_checkpoint as save_checkpoint
    from gtp_vit.models.factory import create_model as create_model
    from gtp_vit.models.pretrained import load_pretrained as load_pretrained
    from gtp_vit.models.processors import adapt_processor as adapt_processor
    from gtp_vit.patching import is_patched as is_patched
    from gtp_vit.patching import patch as patch
    from gtp_vit.patching import unpatch as unpatch
    from gtp_vit.platforms.embedder import Embedder as Embedder
    from gtp_vit.profiling.macs import macs as macs
    from gtp_vit.profiling.trace import trace as trace
    from gtp_vit.recipes.recipe import Recipe as Recipe
    from gtp_vit.recipes.recipe import read_recipe as read_recipe
    from gtp_vit.training.loop import finetune as finetune
    from gtp_vit.training.settings import TrainingConfig as TrainingConfig
    from gtp_vit.tuning.settings import SearchConfig as SearchConfig
    from gtp_vit.tuning.settings import Target as Target
    from gtp_vit.tuning.settings import TimingConfig as TimingConfig
    from gtp_vit.tuning.settings import Tracking as Tracking
    from gtp_vit.tuning.space import ScheduleLimits as ScheduleLimits
    from gtp_vit.tuning.tune import tune as tune
    from gtp_vit.tuning.tune import tune_and_patch as tune_and_patch

# The public names, by the module that defines them; the imports above say the same to type checkers and editors.
MODULES_OF_NAMES = {
    "core.reducer": "Method",
    "embeddings.embed": "PictureFolder embed",
    "embeddings.manifest": "read_embeddings",
    "engines.export": "export",
    "errors": "GTPError UnsupportedModelError",
    "methods": "METHODS make_method method_from_dict",
    "methods.atc": "ATC",
    "methods.ats": "ATS",
    "methods.diffrate": "DiffRate",
    "methods.dynamicvit": "DynamicViT",
    "methods.evit": "EViT",
    "methods.evovit": "EvoViT",
    "methods.gtp": "GTP",
    "methods.gtp_plus.learning.calibrate": "calibrate",
    "methods.gtp_plus.method": "GTPPlus",
    "methods.identity": "Identity",
    "methods.mctf": "MCTF",
    "methods.pitome": "PiToMe",
    "methods.ppt": "PPT",
    "methods.tofu": "ToFu",
    "methods.tome": "ToMe",
    "methods.trilevel": "TriLevel",
    "models.checkpoint": "save_checkpoint",
    "models.factory": "create_model",
    "models.pretrained": "load_pretrained",
    "models.processors": "adapt_processor",
    "patching": "is_patched patch unpatch",
    "platforms.embedder": "Embedder",
    "profiling.macs": "macs",
    "profiling.trace": "trace",
    "recipes.recipe": "Recipe read_recipe",
    "training.loop": "finetune",
    "training.settings": "TrainingConfig",
    "tuning.settings": "SearchConfig Target TimingConfig Tracking",
    "tuning.space": "ScheduleLimits",
    "tuning.tune": "tune tune_and_patch",
}
_MODULES = {name: module for module, names in MODULES_OF_NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gtp_vit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gtp_vit.{_MODULES[name]}"), name)
    globals()[name] = value  # so that the next use is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
