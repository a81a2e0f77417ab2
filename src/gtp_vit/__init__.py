"""gtp-vit: make a pre-trained Vision Transformer faster in one call, without finetuning."""

__version__ = "0.1.0"

from gtp_vit.core.reducer import Method as Method
from gtp_vit.engines.export import export as export
from gtp_vit.errors import GTPError as GTPError
from gtp_vit.errors import UnsupportedBackbone as UnsupportedBackbone
from gtp_vit.features.contents import read_embeddings as read_embeddings
from gtp_vit.features.embed import embed as embed
from gtp_vit.inputs.models import create_model as create_model
from gtp_vit.inputs.pretrained import load_pretrained as load_pretrained
from gtp_vit.inputs.processors import fit_processor as fit_processor
from gtp_vit.measure.macs import macs as macs
from gtp_vit.measure.trace import trace as trace
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
from gtp_vit.methods.gtp_plus import GTPPlus as GTPPlus
from gtp_vit.methods.identity import Identity as Identity
from gtp_vit.methods.mctf import MCTF as MCTF
from gtp_vit.methods.pitome import PiToMe as PiToMe
from gtp_vit.methods.ppt import PPT as PPT
from gtp_vit.methods.tofu import ToFu as ToFu
from gtp_vit.methods.tome import ToMe as ToMe
from gtp_vit.methods.trilevel import TriLevel as TriLevel
from gtp_vit.patch import is_patched as is_patched
from gtp_vit.patch import patch as patch
from gtp_vit.patch import unpatch as unpatch
from gtp_vit.recipes import Recipe as Recipe
from gtp_vit.recipes import read_recipe as read_recipe
from gtp_vit.runs.checkpoint import save_checkpoint as save_checkpoint
from gtp_vit.search.calibrate import calibrate as calibrate
from gtp_vit.search.space import Limits as Limits
from gtp_vit.search.tune import accelerate as accelerate
from gtp_vit.search.tune import tune as tune
from gtp_vit.training.loop import finetune as finetune
from gtp_vit.training.settings import Training as Training
