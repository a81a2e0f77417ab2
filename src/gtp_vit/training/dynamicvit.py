"""DynamicViT's training: outputs of student and teacher, and the loss with its four terms.

Shapes: B batch, M image tokens, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from gtp_vit.core.loop import run
from gtp_vit.errors import SettingError
from gtp_vit.methods.dynamicvit import DynamicViTReducer
from gtp_vit.methods.identity import Identity
from gtp_vit.patching import is_patched, patch, tower_of


class Outputs(NamedTuple):
    """Outputs of one forward pass in which no token leaves."""

    logits: Tensor  # [B, classes]
    features: Tensor  # [B, M, C]: image tokens after the last norm; of models with an auxiliary head, its logits
    decisions: tuple[Tensor, ...]  # [B, M] for each stage: 1 = the token stays; none for the teacher


class Losses(NamedTuple):
    """The total and its terms, before they are weighted."""

    total: Tensor
    cls: Tensor  # cross entropy with soft labels
    ratio: Tensor  # squared distance of the share that stays from the one wanted, summed over stages
    cls_kl: Tensor  # KL(teacher || student) of the class probabilities
    token: Tensor  # distance of the features of the tokens that stay from the teacher's


def kl_from_teacher(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of logits [rows, classes], averaged over rows."""
    student, teacher = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def outputs(model: nn.Module, images: Tensor) -> Outputs:
    """Outputs of a model patched with DynamicViT in training mode, or of the unreduced model as teacher."""
    teacher = not is_patched(model)
    tower = tower_of(patch(model, Identity()) if teacher else model)
    if not teacher and not (isinstance(tower.reducer, DynamicViTReducer) and model.training):
        raise SettingError(
            "the student must be a model patched with DynamicViT in training mode; call train() on it; unpatch it if "
            "it is the teacher"
        )
    backbone = tower.reduction.backbone
    tokens = run(tower, images)
    features = backbone.norm(tower)(tokens.x)
    scores = backbone.token_classifier(tower)
    image = features[:, tokens.prefix :]
    decisions = () if teacher else tuple(decision.squeeze(-1) for decision in tokens.method_state.stages)
    return Outputs(backbone.head(tower, features), image if scores is None else scores(image), decisions)


def losses(
    student: Outputs,
    teacher: Outputs | None,
    labels: Tensor,
    reducer: DynamicViTReducer,
    *,
    cls_weight: float = 1.0,
    ratio_weight: float = 2.0,
    distill_weight: float = 0.5,
    token_kl: bool = False,
) -> Losses:
    """The original's loss.

    Args:
        student: outputs of the model in training.
        teacher: outputs of the unreduced model; without them there are no distillation terms.
        labels: probabilities of the classes, [B, classes].
        reducer: the student's, which knows how many tokens should stay.
        cls_weight: weight of the cross entropy.
        ratio_weight: weight of the ratio term, divided by the number of stages; 5 for DeiT-B.
        distill_weight: weight of the two distillation terms.
        token_kl: compare tokens by the KL divergence of their logits (LV-ViT), not by the squared distance.
    """
    if not student.decisions:
        raise SettingError("the student decided nothing: keep_ratio is 1, so there is nothing to learn")
    cls = (-labels * student.logits.log_softmax(dim=-1)).sum(dim=-1).mean()
    ratio = student.logits.new_zeros(())
    for stage, decision in enumerate(student.decisions):
        target = reducer.method.keep_ratio ** (stage + 1)
        ratio = ratio + (decision.mean(dim=1) - target).square().mean()
    cls_kl = ratio.new_zeros(()) if teacher is None else kl_from_teacher(student.logits, teacher.logits)
    stays = student.decisions[-1].detach() > 0.5
    token = student.features.sum() * 0  # if no token stays; every parameter needs a gradient even then
    if teacher is not None and bool(stays.any()):
        pair = student.features[stays], teacher.features[stays]
        token = kl_from_teacher(*pair) if token_kl else F.mse_loss(*pair)
    total = cls_weight * cls + ratio_weight * ratio / len(student.decisions) + distill_weight * (cls_kl + token)
    return Losses(total, cls, ratio, cls_kl, token)
