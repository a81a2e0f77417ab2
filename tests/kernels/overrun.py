"""Reads past the end of a tensor on purpose: `make sanitize-short` must see it, or it would prove nothing.

Not a test: `python tests/overrun.py FOLDER` calls a kernel of that folder's library without the checks in front of it.
"""

import sys
from pathlib import Path

import torch

from gtp_vit.kernels import native
from gtp_vit.kernels.arguments import AttentionInputs

if __name__ == "__main__":
    native.load_from(Path(sys.argv[1]))
    q = torch.randn(1, 2, 5, 16)
    native.attention(
        AttentionInputs(q, q, q, torch.ones(1, 3), 0.25, 0, 5, [False, False, False], 0, 0)
    )  # three sizes for five keys
