"""GTP's, GTP+'s and ToMe's steps as Triton kernels: tensors in, tensors out.

The folder stands for itself, with torch and Triton and relative imports only, as Hugging Face's library `kernels` wants
it (a copy of it is a build named torch-cuda). Importing it imports Triton. `gtp_vit.kernels.triton_set` says when its
functions run; each is a torch.library.triton_op, so that torch.compile sees its kernels.

Limits: 4,096 image tokens, 4,096 channels, heads of at most 256 channels; float32, float16 and bfloat16. No gradients.
"""

from .gtp import propagate
from .gtp_plus import importance_by_probe, merge_by_cost
from .map_statistics import attention_statistics
from .tome import match_pairs, merge_pairs

__all__ = [
    "attention_statistics",
    "importance_by_probe",
    "match_pairs",
    "merge_by_cost",
    "merge_pairs",
    "propagate",
]
