"""The model in training with its optimiser: one step, and the state to resume from."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from gtp_vit.core.loop import PatchedModel
from gtp_vit.core.reducer import Method
from gtp_vit.data.items import Batch
from gtp_vit.errors import GTPError, SettingError
from gtp_vit.patching import host_of, patch, tower_of, unpatch
from gtp_vit.runs import distributed
from gtp_vit.training.data import PART, Mixer, seeded
from gtp_vit.training.protocols import Protocol, Terms, TrainingInputs, parameter_groups, protocol_of
from gtp_vit.training.settings import TrainingConfig


class Student(nn.Module):
    """A module from images to losses, so that DistributedDataParallel sees one forward pass."""

    def __init__(self, model: PatchedModel, protocol: Protocol, settings: TrainingConfig) -> None:
        super().__init__()
        self.model: PatchedModel = model
        self.extra = protocol.extra_modules(model).to(next(model.parameters()).device)
        self.protocol, self.settings = protocol, settings

    def forward(self, inputs: TrainingInputs) -> Terms:
        return self.protocol.loss_terms(self.model, self.extra, inputs, self.settings)


class TrainerState(TypedDict):
    """The state that a run resumes from, as state dictionaries."""

    student: dict[str, Tensor]
    optimizer: dict[str, Any]
    ema: dict[str, Tensor] | None


class Trainer:
    """A copy of the user's model, reduced, with everything that changes in training."""

    def __init__(self, original: nn.Module, method: Method, settings: TrainingConfig, steps: int) -> None:
        """`steps` is the total number of steps."""
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler
        from timm.utils import ModelEmaV3

        protocol = protocol_of(method, settings)
        self.method, self.protocol, self.settings, self.steps = method, protocol, settings, steps
        self.teacher = copy.deepcopy(unpatch(original)).eval().requires_grad_(False)
        plain = copy.deepcopy(self.teacher).requires_grad_(True)
        host = host_of(plain)
        if not host.backbone.set_drop_path(host.tower, protocol.drop_path) and settings.drop_path:
            raise SettingError(f"{type(plain).__name__} has no stochastic depth; remove --drop-path")
        untrained = set() if protocol.trains_embedding else host.backbone.embedding_parameters(host.tower)
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(name not in untrained)
        host.backbone.set_grad_checkpointing(host.tower, settings.grad_checkpointing)
        self.model = tower_of(patch(plain, method, quiet=True))  # a ViT itself
        self.student = Student(self.model, protocol, settings)
        self.parallel: nn.parallel.DistributedDataParallel | None = None
        if distributed.rank_and_world_size()[1] > 1:
            self.parallel = nn.parallel.DistributedDataParallel(self.student)
        groups = parameter_groups(protocol, self.model, self.student.extra)
        rates = {"lr": protocol.lr, "weight_decay": protocol.weight_decay}
        self.optimizer: torch.optim.Optimizer = create_optimizer_v2(groups, "adamw", **rates)
        self.schedule = CosineLRScheduler(
            self.optimizer,
            t_initial=steps,
            lr_min=protocol.min_lr,
            warmup_t=round(protocol.warmup * steps),
            warmup_lr_init=min(1e-6, protocol.min_lr),
            t_in_epochs=False,
        )
        self.ema = ModelEmaV3(self.model, decay=settings.ema) if settings.ema else None
        self.mixer = Mixer(settings, host.inputs.classes)
        self.device = next(plain.parameters()).device

    def start_epoch(self, method: Method) -> None:
        """Install this epoch's settings and set the training mode."""
        set_method(self.model, method)
        self.student.train(not self.protocol.eval_mode)
        for module in self.student.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()  # batch statistics would depend on the parts

    def train_step(self, step: int, steps_of_epoch: int, parts: list[Batch]) -> dict[str, float]:
        """Do one step on this process's parts; returns the mean loss over all processes, and its terms."""
        epoch, within = divmod(step, steps_of_epoch)
        rank, processes = distributed.rank_and_world_size()
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(parts):
            key = (PART, self.settings.train_seed, epoch, within, rank + index * processes)
            with seeded(*key), self._no_sync(index < len(parts) - 1):
                terms = self.compute_loss(batch)
                (terms["loss"] / len(parts)).backward()
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value.detach().float() / len(parts)
        means = distributed.all_reduce_mean(torch.stack(list(sums.values())))
        max_norm = math.inf if self.settings.clip_grad is None else self.settings.clip_grad
        norm = nn.utils.clip_grad_norm_(self.student.parameters(), max_norm)
        figures = dict(zip(sums, means.tolist(), strict=True)) | {"gradient": float(norm)}
        if not all(math.isfinite(value) for value in figures.values()):
            wrong = next(name for name, value in figures.items() if not math.isfinite(value))
            raise NonFiniteError(
                f"the {wrong} is {figures[wrong]} in step {step + 1} of {self.steps} (epoch {epoch + 1})"
            )
        self.set_learning_rate(step, epoch)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model, step=step + 1)
        return {**figures, "lr": max(group["lr"] for group in self.optimizer.param_groups)}

    def _no_sync(self, more: bool) -> AbstractContextManager[None]:
        """Skip the exchange of gradients between processes until the last part of a step."""
        return self.parallel.no_sync() if more and self.parallel is not None else contextlib.nullcontext()

    def set_learning_rate(self, step: int, epoch: int) -> None:
        """Set the learning rates, which depend on the step alone."""
        self.schedule.step_update(step)
        for group in self.optimizer.param_groups:
            if group["frozen"] and epoch < self.protocol.frozen_until(self.settings.epochs):
                group["lr"] = 0.0

    def compute_loss(self, batch: Batch) -> Terms:
        """The loss of one part, and its terms."""
        if len(batch.images) < 1 + self.settings.uses_mixup:
            problem = next(iter(batch.unreadable.values()))
            raise GTPError(f"too few images of one part could be read: {problem}; repair or remove them")
        images, labels = self.mixer(batch.images.to(self.device), batch.labels.to(self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.amp == "bfloat16"):
            teacher_outputs = None
            if self.protocol.needs_teacher(self.settings):
                with torch.no_grad():
                    teacher_outputs = self.protocol.teacher_outputs(self.teacher, images)
            return (self.parallel or self.student)(TrainingInputs(images, labels, teacher_outputs))

    def eval_model(self) -> PatchedModel:
        """The model (its moving average, if there is one) in eval mode, with the full reduction."""
        model: PatchedModel = self.model if self.ema is None else self.ema.module
        set_method(model, self.method)
        return model.eval()

    def state_dict(self) -> TrainerState:
        if not all(bool(value.isfinite().all()) for value in self.student.state_dict().values()):
            raise NonFiniteError("a weight is not finite any more")
        return {
            "student": self.student.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
        }

    def load_state_dict(self, state: TrainerState | None) -> None:
        """Load a state, which only the first process has, and copy its tensors into those of the others."""
        if state is not None:
            self.student.load_state_dict(state["student"])
            # Copied, because the optimiser keeps the tensors it gets, and these are mapped from the file.
            self.optimizer.load_state_dict(map_tensors(state["optimizer"], torch.clone))
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
        outline = distributed.broadcast(map_tensors(self.optimizer.state_dict(), lambda tensor: tensor.to("meta")))
        if state is None:
            self.optimizer.load_state_dict(map_tensors(outline, lambda tensor: torch.empty_like(tensor, device="cpu")))
        distributed.broadcast_tensors(self.student.state_dict().values())
        moments = self.optimizer.state_dict()["state"].values()
        distributed.broadcast_tensors(
            value for tensor in moments for value in tensor.values() if isinstance(value, Tensor)
        )
        if self.ema is not None:
            distributed.broadcast_tensors(self.ema.module.state_dict().values())


def map_tensors(optimizer: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The state of an optimiser with every tensor changed."""
    state = {
        index: {name: change(value) if isinstance(value, Tensor) else value for name, value in moments.items()}
        for index, moments in optimizer["state"].items()
    }
    return {**optimizer, "state": state}


class NonFiniteError(GTPError):
    """A loss, gradient or weight that is not finite; the weights were not changed by it."""


def set_method(model: PatchedModel, method: Method) -> None:
    """Give a patched model different settings of its method, and keep its learned parts."""
    if model.reduction.method == method:
        return
    weight = next(model.parameters())
    reducer = method.build(model.reduction.vit).train(model.training).to(weight.device, weight.dtype)
    for name, value in model.reducer.state_dict(keep_vars=True).items():  # the optimiser's own tensors
        path, _, leaf = name.rpartition(".")
        setattr(reducer.get_submodule(path), leaf, value)
    model.reducer = reducer
    model.reduction = dataclasses.replace(model.reduction, method=method)
