"""The distance from a teacher in class probabilities."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def kl_from_teacher(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of logits [rows, classes], averaged over rows."""
    student, teacher = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)
