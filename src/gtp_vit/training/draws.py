"""Random numbers that depend on a key, not on what was drawn before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def drawn_from(*key: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators by `key`, and restore them afterwards."""
    first, second = (int(word) for word in np.random.SeedSequence(key).generate_state(2))
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(first)
        np.random.seed(first)
        torch.manual_seed(first << 32 | second)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
