"""The interface between the library and a family of models.

Only backbones read attributes of a model; the rest of the library asks them. A family is a subclass of `Backbone` in
backbones/, with a line in the registry there; it holds no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from gtp_vit.core.attention import QKV
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.errors import GTPError, SettingError, UnsupportedModelError


@dataclass(frozen=True)
class Inputs:
    """The images a model takes, and the preprocessing that its weights expect."""

    name: str  # of the architecture, or the name of its class
    size: tuple[int, int]  # height and width
    any_size: bool  # does it take other sizes as well?
    patch: tuple[int, int]  # height and width of a patch
    channels: int
    classes: int  # 0 = it has no classifier
    weights: str = ""  # name of its pre-trained weights
    preprocessing: dict[str, Any] | None = None  # mean, std, crop_pct, interpolation, ... as timm calls them
    labels: tuple[str, ...] | None = None  # names of the classes, if the model knows them


class Output(NamedTuple):
    """The kind and width of a model's output for each image."""

    kind: Literal["classes", "features", "embedding", "tokens"]
    # classes: a score for each; features: pooled, without a classifier; embedding: to be compared with those of texts;
    # tokens: something for every token
    width: int


# Hugging Face's models return several things, by name.
FIELDS = {"classes": "logits", "features": "pooler_output", "embedding": "image_embeds", "tokens": "last_hidden_state"}


def primary_output(output: object, kind: str) -> Any:
    """The model's output, or of several outputs the one that its `Output.kind` means."""
    if isinstance(output, Tensor):
        return output
    scores = getattr(output, FIELDS["classes"], output)  # a classifier without classes returns its features there
    return getattr(output, FIELDS[kind], scores if kind == "features" else output)


Part = Literal["all", "map", "values"]  # of the projections: queries, keys and values; queries and keys; values

Transform = Callable[[Any], Tensor]  # from a picture


class Library:
    """A library of models. It is imported only when one of its models is asked for."""

    title: str  # as people call it
    prefix = ""  # of the names of its models, as hf in hf:NAME; those of timm and of this package have none
    has_weights = False  # does a name mean weights, too?

    def has_model(self, name: str) -> bool:
        """Has the library a model of this name, as far as that can be known?"""
        return False

    def create(
        self, name: str, *, pretrained: bool, checkpoint: Path | None, meta: bool, sizes: dict[str, Any]
    ) -> nn.Module:
        """A model in eval mode; `sizes` may have img_size and num_classes."""
        raise GTPError(f"models of {self.title} cannot be created by name")

    def resize(self, model: nn.Module, img_size: int | tuple[int, int]) -> None:
        """Let a model take images of this size: its absolute positions are resampled."""
        raise SettingError(f"positions of {self.title}'s models are not resampled; remove resample_positions")

    def create_without_weights(self, name: str) -> nn.Module:
        """The model without weights and perhaps with fewer blocks, to see what it is made of."""
        return self.create(name, pretrained=False, checkpoint=None, meta=True, sizes={})

    def transform(self, name: str, model: nn.Module) -> Transform | None:
        """From a picture to a tensor as the model's weights want it; None: as its `inputs.preprocessing` says."""
        return None

    def preprocessing(self, name: str) -> dict[str, Any] | None:
        """The same in timm's words, for people and other programs; None: the model's own `inputs.preprocessing`."""
        return None

    def public_name(self, name: str) -> str:
        """The name without a folder of this machine."""
        return name


class Backbone(Protocol):
    """The interface of a model family. See backbones/timm_vit.py."""

    classes: tuple[str, ...]  # whose instances it takes, as the library calls them
    models: str = ""  # the best-known of them, for people
    forwards: type  # mixed into the class of a patched ViT: the model's own entry points, running the loop

    # The model

    def library(self) -> Library:
        """Where its models come from; it is imported here, as patching a model does not need it."""
        raise NotImplementedError

    def model_names(self) -> list[str]:
        """Names of its library's models that may belong to the family; none if they cannot be listed."""
        return []

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        """Name -> a function that makes a small model of so many layers: one of each kind that the code distinguishes.

        For tests; about 24 channels and 8 x 8 patches. None where the library is not installed.
        """
        return {}

    def matches(self, model: nn.Module) -> bool:
        """Does this model belong to the family?"""

    def unsupported_reason(self, model: nn.Module) -> str | None:
        """None if every module of the model is supported, else the reason why it is not."""

    def vit_info(self, model: nn.Module) -> ViTInfo:
        """The sizes of the model: all that a method knows of it."""

    def inputs(self, model: nn.Module) -> Inputs:
        """The images the model takes."""

    def output(self, model: nn.Module) -> Output:
        """The kind and width of the model's output; no image is run."""

    def grid(self, model: nn.Module) -> tuple[int, int]:
        """Rows and columns of patches at the model's own image size."""

    def needs_all_patches(self, model: nn.Module) -> str | None:
        """Why no patch may be missing behind the blocks, so that it needs restore; None if some may."""
        return None

    def head_reads_image_tokens(self, model: nn.Module) -> bool:
        """False if pooling and head, as they are set now, read prefix tokens only."""

    # A forward pass, in this order

    def embed(self, model: nn.Module, images: Tensor) -> Tokens:
        """The tokens that go into the first block."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]: ...

    def run_block(self, block: nn.Module, layer: int, tokens: Tokens) -> Tensor:
        """The features after one of the model's own blocks, for layers that a method leaves alone."""

    def project(self, block: nn.Module, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        """Queries, keys and values of a block's attention; queries of the first `queries` tokens if given.

        `part`: what of them is used; the rest may be anything, so a family can save computing it.
        """

    def attention_branch(self, block: nn.Module, out: Tensor) -> Tensor:
        """The attention branch, ready to be added to x: projection and scales applied to the output of attention."""

    def mlp_norm(self, block: nn.Module) -> nn.LayerNorm | None:
        """The norm before the MLP, if it is a plain LayerNorm that a kernel may compute."""
        return None

    def mlp_branch(self, block: nn.Module, x: Tensor, normed: Tensor | None) -> Tensor:
        """The MLP branch, ready to be added to x; `normed` is x after the norm, if that was computed already."""

    def norm(self, model: nn.Module) -> nn.Module:
        """The norm after the last block."""

    def head(self, model: nn.Module, features: Tensor) -> Tensor:
        """Pooling and classifier, from the normed features of all tokens."""

    def remove_classifier(self, model: nn.Module) -> None:
        """Let a model that scores classes return the features that its classifier reads."""
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot do without its classifier; ask for its class scores instead"
        )

    # Training

    def uses_grad_checkpointing(self, model: nn.Module) -> bool:
        """Is gradient checkpointing on?"""
        return False

    def set_grad_checkpointing(self, model: nn.Module, enable: bool) -> None:
        """Switch gradient checkpointing on or off."""

    def set_drop_path(self, model: nn.Module, rate: float) -> bool:
        """Set stochastic depth, rising from 0 in the first layer to `rate` in the last; False if there is none."""
        return False

    def no_weight_decay(self, model: nn.Module) -> set[str]:
        """Names of parameters without weight decay, besides biases and norms."""
        return set()

    def embedding_parameters(self, model: nn.Module) -> set[str]:
        """Names of the class token's and the position embedding's parameters."""
        return set()

    def classifier(self, model: nn.Module) -> nn.Module:
        """The layer that scores classes, from one feature vector."""

    def token_classifier(self, model: nn.Module) -> nn.Module | None:
        """The layer that scores classes for every image token; None if the model has none."""
        return None
