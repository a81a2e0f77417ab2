"""A method that removes nothing, but sends every layer through our own attention."""

from dataclasses import dataclass
from typing import ClassVar

from gtp_vit import Method
from gtp_vit.core.attention import Ask
from gtp_vit.core.reducer import Reducer
from gtp_vit.kernels import reference


@dataclass(frozen=True, kw_only=True, repr=False)
class Probe(Method):
    """Removes nothing, but sends every layer through our own attention."""

    name: ClassVar[str] = "probe"
    statistics: frozenset[str] = frozenset()
    look: bool = False

    def build(self, vit):
        reducer = Reducer(vit)
        reducer.ask = lambda layer, tokens: Ask(self.statistics, look=self.look)
        reducer.look = lambda layer, tokens, probs: (tokens, probs)
        reducer.weigh = lambda probs, v, queries: reference.weigh(probs[:, :, :queries], v)
        return reducer
