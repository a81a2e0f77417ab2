"""The interface of a method: its settings, a `Method`, and its forward pass, a `Reducer`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from gtp_vit.core.attention import PLAIN, Adjustments
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.schedule import even_schedule, keep_ratio_at, removals, same_share, scale_keep_ratio, scale_schedule
from gtp_vit.core.settings import coerce_setting
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ForwardPass, LayerTokens, ViTInfo
from gtp_vit.errors import SettingError


class Reducer(nn.Module):
    """A method in a forward pass. A Module, so that its buffers and learned parts follow the model.

    In each layer: `before`, `adjust`, `attend`, which calls `reduce`, the MLP, `after`; and at the end `finish`. Most
    methods need two or three of these.
    """

    edits_map = False  # does `adjust` ever edit the attention map?
    plan: tuple[int, ...] | None = None  # `removals` of the model's own grid, computed once
    adaptive = False  # does the number of tokens depend on the image?
    min_tokens = 1  # image tokens that a schedule must leave
    reads_image_tokens = False  # does `finish` read image tokens? Then the last block computes them all.
    drops_patches = True  # may a patch be left without a token that stands for it?

    def __init__(self, vit: ViTInfo, method: Any = None) -> None:
        super().__init__()
        self.vit, self.method = vit, method

    def removals(self, grid: tuple[int, int]) -> tuple[int, ...]:
        """Image tokens that each layer removes on this grid, for methods with a schedule; `steps` is true of all."""
        if self.method is None or self.method.schedule_field is None:
            return (0,) * self.vit.depth
        schedule, tokens = getattr(self.method, self.method.schedule_field), grid[0] * grid[1]
        depth, limit = self.vit.depth, type(self.method).max_removable
        if self.vit.mixed_sizes and grid != self.vit.grid:
            own = self.vit.image_tokens
            schedule = same_share(removals(schedule, depth, own, limit), own, tokens)
        return removals(schedule, depth, tokens, limit)

    def removals_of(self, tokens: Tokens) -> tuple[int, ...]:
        """`removals` on the grid of these tokens."""
        if self.plan is None or tokens.grid != self.vit.grid:
            return self.removals(tokens.grid)
        return self.plan

    def steps(self, grid: tuple[int, int]) -> tuple[LayerTokens, ...]:
        """The tokens of each layer on this grid, for the MAC counter."""
        left, layers = grid[0] * grid[1], []
        for removed in self.removals(grid):
            layers.append(LayerTokens(left, left, left - removed, left - removed))
            left -= removed
        return tuple(layers)

    def start(self, tokens: Tokens) -> Tokens:
        """Called once, with the embedded tokens."""
        return tokens

    def before(self, layer: int, tokens: Tokens) -> Tokens:
        """Called before every layer, for methods that prune there."""
        return tokens

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        """The changes to the attention of `layer`, PLAIN if it is only read.

        None: the layer is left alone, and the model's own block runs. By default a layer that removes nothing is.
        """
        return PLAIN if self.removals_of(tokens)[layer] else None

    def add_and_reduce(self, attention: LayerAttention) -> Tokens:
        """The tokens after attention and reduction, for all layers but those that are left alone.

        A method that reduces before the output is computed overrides this one. Usually that would not change the
        prefix tokens, so nothing is removed in a last block that is shortened to them.
        """
        return attention.add() if attention.prefix_only else self.reduce(attention)

    def reduce(self, attention: LayerAttention) -> Tokens:
        """Read statistics, add the attention branch, remove tokens."""
        return attention.add()

    def after(self, layer: int, tokens: Tokens) -> Tokens:
        """Called after every layer, except one that was shortened to the prefix tokens."""
        return tokens

    def finish(self, tokens: Tokens, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """The features for pooling and classifier, after the model's last norm."""
        return norm(tokens.x)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        """MACs of the method's own work."""
        return 0

    def class_row_macs(self, image_tokens: int) -> int:
        """MACs of the class token's row, which is computed once more because fused attention has no map."""
        return (image_tokens + self.vit.prefix) * self.vit.heads * self.vit.head_dim


class Source(NamedTuple):
    """Where a method comes from."""

    paper: str
    code: str
    licence: str  # of that code, none of which is in this package


def _short(value: object) -> str:
    """A setting as Python writes it; of a text that nobody reads, such as a calibration, what tells it from others."""
    if isinstance(value, str) and len(value) > 300:
        return f"'{hashlib.sha256(value.encode(errors='replace')).hexdigest()[:8]}...'"
    return repr(value)


@dataclass(frozen=True, kw_only=True, repr=False)
class Method:
    """Settings of a method: frozen, comparable, hashable, and the only place where a default is written.

    >>> from gtp_vit import ToMe
    >>> method = ToMe(r=14)
    >>> method
    ToMe(r=14)
    >>> method == ToMe(r=14), method.to_dict()["r"]
    (True, 14)
    """

    name: ClassVar[str]
    source: ClassVar[Source]
    needs_class_token: ClassVar[bool] = False
    fixed_shapes: ClassVar[str] = "yes"  # is the number of tokens known before the image is seen?
    not_exported: ClassVar[str | None] = None  # why engines cannot do what it does, and the way out; None = they can
    trained_parts: ClassVar[str] = "none"  # parts that must be trained
    attention_inputs: ClassVar[str] = "nothing"  # what it reads of attention
    schedule_field: ClassVar[str | None] = None  # name of the setting with one number per layer, which `tune` searches
    max_removable: ClassVar[Callable[[int], int] | None] = None  # how many of a layer's tokens can leave; None = all
    keep_ratio_field: ClassVar[str | None] = None  # or the setting that says which share of the tokens stays
    weight_file_fields: ClassVar[tuple[str, ...]] = ()  # settings with the file of a submodule of the same name
    opaque_fields: ClassVar[tuple[str, ...]] = ()  # settings that hold learned parts themselves, as a long text
    tunable: ClassVar[dict[str, tuple[float, float]]] = {}  # other settings that `tune` changes, and their ranges

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, coerce_setting(type(self), field.name, getattr(self, field.name)))

    def build(self, vit: ViTInfo) -> Reducer:
        """Check the settings against this ViT and make the reducer; raises GTPError."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Class name and the settings that differ from the defaults."""
        fields = dataclasses.fields(self)
        shown = [f"{f.name}={_short(getattr(self, f.name))}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def at_strength(cls, vit: ViTInfo, strength: float) -> Method:
        """Settings of a strength from 0, which removes nothing, to 1, the most; the model's MACs never rise with it."""
        if cls.schedule_field is not None:
            return cls(**{cls.schedule_field: even_schedule(strength, vit.depth, vit.image_tokens)})
        if cls.keep_ratio_field is not None:
            return cls(**{cls.keep_ratio_field: keep_ratio_at(strength)})
        raise SettingError(f"{cls.name} has no setting that says how much is removed")

    def scaled(self, vit: ViTInfo, fraction: float) -> Method:
        """These settings at a share of their strength: 1 = unchanged, 0 = nothing is removed."""
        if fraction == 1:
            return self
        if self.schedule_field is not None:
            weaker_one = scale_schedule(
                getattr(self, self.schedule_field), fraction, vit.depth, vit.image_tokens, type(self).max_removable
            )
            return dataclasses.replace(self, **{self.schedule_field: weaker_one})
        if self.keep_ratio_field is not None:
            return dataclasses.replace(
                self, **{self.keep_ratio_field: scale_keep_ratio(getattr(self, self.keep_ratio_field), fraction)}
            )
        raise SettingError(
            f"{self.name} has no strength that could grow during training; remove ramp_start and ramp_epochs"
        )

    def check_weights(self, weights: Iterable[Tensor]) -> None:
        """Refuse a model, by the matrices of its blocks, on whose weights these settings were not learned."""

    def with_fingerprint_of(self, weights: Iterable[Tensor]) -> Method:
        """These settings for a model that was finetuned with them, by the matrices of its blocks."""
        return self

    def warning(self) -> str | None:
        """A warning that `patch` shows for settings that cannot give good results; None = no warning."""
        return None

    def check_class_token(self, vit: ViTInfo) -> None:
        """Refuse models without a class token, for methods that need one."""
        if not vit.class_token:
            raise SettingError(
                f"{type(self).__name__} ranks tokens by the class token's attention, and this model has none; "
                "use GTP or ToMe, which need none"
            )

    def to_dict(self) -> dict[str, object]:
        """The settings and the method's name, ready for JSON; `gtp_vit.method_from_dict` reads them back."""
        return {"method": self.name, **dataclasses.asdict(self)}
