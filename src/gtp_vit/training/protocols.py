"""The authors' finetuning protocol of each method, where it differs: learning rates, mode, heads, losses.

A new one is a class here and a line in PROTOCOLS; methods without one are finetuned as the paper finetunes GTP.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gtp_vit.core.loop import PatchedModel, run
from gtp_vit.core.reducer import Method
from gtp_vit.errors import SettingError
from gtp_vit.methods.dynamicvit import DynamicViT, DynamicViTReducer
from gtp_vit.methods.evit import EViT
from gtp_vit.methods.evovit import EvoViT
from gtp_vit.training import dynamicvit
from gtp_vit.training.settings import TrainingConfig

Terms = dict[str, Tensor]  # "loss", and what it is made of
TeacherOutputs = Tensor | dynamicvit.Outputs


class TrainingInputs(NamedTuple):
    """The inputs of a loss."""

    images: Tensor
    labels: Tensor  # soft, [B, classes]
    teacher_outputs: TeacherOutputs | None  # what the unreduced model says of the same images


@dataclass(frozen=True)
class Protocol:
    """The paper's recipe: DeiT's, at a low learning rate, with the reduction active."""

    lr: float = 1e-5
    min_lr: float = 1e-6
    weight_decay: float = 0.05
    warmup: float = 5 / 30
    drop_path: float = 0.1
    eval_mode: bool = False  # no dropout and no stochastic depth in training
    frozen_fraction: float = 0.0  # share of the run in which only the learned parts of the method are trained
    learned_lr: float | None = None  # of these parts; None: 100 times the model's
    trains_embedding: bool = True  # are prefix tokens and position embedding trained?

    def with_settings(self, settings: TrainingConfig) -> Protocol:
        """This protocol with the user's settings, which take precedence."""
        names = ("lr", "min_lr", "learned_lr", "weight_decay", "warmup", "drop_path")
        overrides = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
        protocol = dataclasses.replace(self, **overrides)
        if protocol.min_lr > protocol.lr:
            raise SettingError(
                f"min_lr is {protocol.min_lr:g}, more than lr, which is {protocol.lr:g}; give a smaller min_lr"
            )
        return protocol

    def learning_rate(self, learned: bool) -> float:
        """Highest learning rate of the model, or of the learned parts of the method."""
        if not learned:
            return self.lr
        return 100 * self.lr if self.learned_lr is None else self.learned_lr

    def extra_modules(self, model: PatchedModel) -> nn.Module:
        """Modules that only training needs; they are in the checkpoint, but not among the weights."""
        return nn.Module()

    def method_at(self, method: Method, progress: float) -> Method:
        """The method after this share of the run."""
        return method

    def check(self, method: Method, settings: TrainingConfig) -> None:
        """Raise SettingError if there is nothing to learn with these settings."""

    def teacher_outputs(self, teacher: nn.Module, images: Tensor) -> TeacherOutputs:
        """The outputs of the unreduced model that `loss_terms` needs."""
        return teacher(images)

    def distill(self, settings: TrainingConfig) -> float:
        """Weight of the distance from the unreduced model; without labels there is nothing else to learn from."""
        return float(not settings.labels) if settings.distill is None else settings.distill

    def needs_teacher(self, settings: TrainingConfig) -> bool:
        return self.distill(settings) > 0

    def loss_terms(
        self, model: PatchedModel, extra: nn.Module, inputs: TrainingInputs, settings: TrainingConfig
    ) -> Terms:
        """The loss and its terms for these images."""
        return self.combined_loss(model(inputs.images), inputs, settings)

    def combined_loss(self, logits: Tensor, inputs: TrainingInputs, settings: TrainingConfig) -> Terms:
        """Cross entropy with soft labels, and the distance from the unreduced model."""
        from timm.loss import SoftTargetCrossEntropy

        assert not isinstance(inputs.teacher_outputs, dynamicvit.Outputs)
        terms: Terms = {}
        loss = logits.new_zeros((), dtype=torch.float32)
        if settings.labels:
            terms["cross_entropy"] = SoftTargetCrossEntropy()(logits.float(), inputs.labels)
            loss = loss + terms["cross_entropy"]
        if inputs.teacher_outputs is not None:
            terms["kl"] = dynamicvit.kl_from_teacher(logits.float(), inputs.teacher_outputs.float())
            loss = loss + self.distill(settings) * terms["kl"]
        return {"loss": loss, **terms}

    def frozen_until(self, epochs: int) -> int:
        """Epochs in which the model itself is not trained."""
        return math.ceil(self.frozen_fraction * epochs)


@dataclass(frozen=True)
class EViTProtocol(Protocol):
    """Eval mode, twice the learning rate, almost no weight decay, no warm-up."""

    lr: float = 2e-5
    min_lr: float = 2e-6
    weight_decay: float = 1e-6
    warmup: float = 0.0
    drop_path: float = 0.0
    eval_mode: bool = True


@dataclass(frozen=True)
class DynamicViTProtocol(Protocol):
    """Predictors learn a hundred times as fast and alone at first; four losses; a class token that stays as it is."""

    drop_path: float = 0.0
    frozen_fraction: float = 5 / 30
    trains_embedding: bool = False

    def check(self, method: Method, settings: TrainingConfig) -> None:
        assert isinstance(method, DynamicViT)
        if method.keep_ratio == 1:
            raise SettingError("keep_ratio is 1: no token ever leaves, so there is nothing to learn; give less")
        if settings.ramp_start or settings.ramp_epochs:
            raise SettingError("DynamicViT reaches keep_ratio by its loss; remove ramp_start and ramp_epochs")

    def distill(self, settings: TrainingConfig) -> float:
        return 0.5 if settings.distill is None else settings.distill

    def teacher_outputs(self, teacher: nn.Module, images: Tensor) -> TeacherOutputs:
        return dynamicvit.outputs(teacher, images)

    def loss_terms(
        self, model: PatchedModel, extra: nn.Module, inputs: TrainingInputs, settings: TrainingConfig
    ) -> Terms:
        teacher_outputs = inputs.teacher_outputs
        assert not isinstance(teacher_outputs, Tensor)
        assert isinstance(model.reducer, DynamicViTReducer)
        student = dynamicvit.outputs(model, inputs.images)
        losses = dynamicvit.losses(
            student,
            teacher_outputs,
            inputs.labels,
            model.reducer,
            cls_weight=float(settings.labels),
            distill_weight=self.distill(settings),
            token_kl=model.reduction.backbone.token_classifier(model) is not None,
        )
        terms = {"loss": losses.total, "cross_entropy": losses.cls, "ratio": losses.ratio}
        return terms if teacher_outputs is None else {**terms, "kl": losses.cls_kl, "token": losses.token}


@dataclass(frozen=True)
class EvoViTProtocol(Protocol):
    """Two heads, of the class token and of the mean of the image tokens; tokens chosen in every layer at first."""

    layer_wise: float = 2 / 3  # share of the run

    def extra_modules(self, model: PatchedModel) -> nn.Module:
        backbone = model.reduction.backbone
        parts = {"norm": backbone.norm(model), "head": backbone.classifier(model)}
        return nn.ModuleDict(copy.deepcopy(parts))

    def method_at(self, method: Method, progress: float) -> Method:
        assert isinstance(method, EvoViT)
        return dataclasses.replace(method, layer_wise=True) if progress < self.layer_wise else method

    def loss_terms(
        self, model: PatchedModel, extra: nn.Module, inputs: TrainingInputs, settings: TrainingConfig
    ) -> Terms:
        assert isinstance(extra, nn.ModuleDict)
        tokens = run(model, inputs.images)
        backbone = model.reduction.backbone
        own = backbone.head(model, model.reducer.finish(tokens, backbone.norm(model)))
        pooled = model.reducer.method.head == "pooled"
        other = tokens.x[:, 0] if pooled else tokens.image.mean(dim=1)
        first = self.combined_loss(own, inputs, settings)
        second = self.combined_loss(extra["head"](extra["norm"](other)), inputs, settings)
        return {name: 0.5 * first[name] + 0.5 * second[name] for name in first}


PROTOCOLS: dict[str, Protocol] = {
    EViT.name: EViTProtocol(),
    DynamicViT.name: DynamicViTProtocol(),
    EvoViT.name: EvoViTProtocol(),
}


def protocol_of(method: Method, settings: TrainingConfig) -> Protocol:
    """The protocol of a method with the user's settings, checked."""
    protocol = PROTOCOLS.get(method.name, Protocol()).with_settings(settings)
    protocol.check(method, settings)
    return protocol


def parameter_groups(protocol: Protocol, model: PatchedModel, extra: nn.Module) -> list[dict[str, Any]]:
    """Groups for the optimiser: with and without weight decay, and the method's learned parts by themselves."""
    return [*_groups(protocol, model, extra, learned=False), *_groups(protocol, model, extra, learned=True)]


def _groups(protocol: Protocol, model: PatchedModel, extra: nn.Module, *, learned: bool) -> Iterator[dict[str, Any]]:
    skip = model.reduction.backbone.no_weight_decay(model)
    chosen = [(name, p) for name, p in model.named_parameters() if name.startswith("reducer.") == learned]
    chosen += [] if learned else list(extra.named_parameters())
    trained = [(name, parameter) for name, parameter in chosen if parameter.requires_grad]
    for decays in (True, False):
        own = [p for name, p in trained if (p.ndim > 1 and name not in skip) == decays]
        if own:
            yield {
                "params": own,
                "lr": protocol.learning_rate(learned),
                "weight_decay": protocol.weight_decay if decays else 0.0,
                "frozen": protocol.frozen_fraction > 0 and not learned,
            }
