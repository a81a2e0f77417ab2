"""A method that removes nothing, but sends every layer through our own attention."""

from dataclasses import dataclass
from typing import ClassVar

from gtp_vit import Method
from gtp_vit.core.attention import PLAIN
from gtp_vit.core.reducer import Reducer
from gtp_vit.kernels import reference


@dataclass(frozen=True, kw_only=True, repr=False)
class Probe(Method):
    """Removes nothing, but sends every layer through our own attention."""

    name: ClassVar[str] = "probe"
    statistics: frozenset[str] = frozenset()
    in_parts: bool = False
    """Compute values apart from queries and keys."""

    def build(self, vit):
        return ProbeReducer(vit, self)


class ProbeReducer(Reducer):
    def adjust(self, layer, tokens):
        return PLAIN

    def add_and_reduce(self, attention):
        if not self.method.in_parts:
            return super().add_and_reduce(attention)
        probs = attention.map_only()
        queries = attention.tokens.prefix if attention.prefix_only else None
        return attention.add(reference.weighted_values(probs[:, :, :queries], attention.values_only()))

    def reduce(self, attention):
        attention.statistics(*self.method.statistics)
        return attention.add()
