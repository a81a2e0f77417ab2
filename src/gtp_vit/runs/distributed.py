"""Several processes as one run: joins the group that torchrun or accelerate started, and exchanges values.

A process that runs alone calls the same functions; they then cost nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from gtp_vit.errors import GTPError

Value = TypeVar("Value")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RESUME_HINT = "start the same command again, with any number of processes: it resumes after what was finished and saved"
# Texts of errors about lost connections; the types of these errors differ between versions.
CONNECTION_ERRORS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "nccl",
    "gloo",
)


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and how many processes there are."""
    return (dist.get_rank(), dist.get_world_size()) if _initialized() else (0, 1)


def is_rank_zero() -> bool:
    """Rank 0 prints and writes; the others only work."""
    return rank_and_world_size()[0] == 0


def all_gather(value: Value) -> list[Value]:
    """The values of all processes, in the order of ranks."""
    if not _initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Value) -> Value:
    """The value of rank 0, in all processes."""
    if not _initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors of all processes with the values that rank 0 has."""
    if not _initialized():
        return
    for tensor in tensors:
        if tensor.numel():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # as bytes: gloo does not support every dtype
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)


def all_reduce_mean(values: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all processes."""
    if _initialized():
        dist.all_reduce(values)
        values = values / dist.get_world_size()
    return values


def check_same_on_all_ranks(what: str, value: object) -> None:
    """Raise GTPError unless all processes have the same value, e.g. flags or data."""
    for rank, other in enumerate(all_gather(value)):
        if other != value:
            raise GTPError(
                f"process {rank_and_world_size()[0]} and process {rank} have different {what}; start all of them "
                "with the same command, version and data"
            )


def device_of(name: str) -> torch.device:
    """`auto` is the accelerator if there is one; several processes of a machine take one each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.zeros(1, device=device).item()  # tensors on the device meta have no numbers
    except Exception as error:  # torch raises many exception types
        raise GTPError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that a launcher started; does nothing in a process that runs alone."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world == "1" or _initialized():
        yield
        return
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise GTPError(f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set; start processes with torchrun")
    rank = os.environ["RANK"]
    if not world.isdigit() or not rank.isdigit() or int(rank) >= int(world):
        raise GTPError(f"RANK is {rank} and WORLD_SIZE is {world}; ranks go from 0 to WORLD_SIZE - 1; use torchrun")
    with _explain_lost_processes(f"process {rank} of {world}"):
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _explain_lost_processes(who: str) -> Iterator[None]:
    """Turn network errors and the launcher's signal, which follow the death of a process, into one clear error."""

    def stop(*_: object) -> None:
        raise _Stopped

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        yield
    except _Stopped:
        raise GTPError(
            f"{who} was told to stop, usually because another one failed or was killed; {RESUME_HINT}"
        ) from None
    except RuntimeError as error:
        if not any(text in str(error).lower() for text in CONNECTION_ERRORS):
            raise
        raise GTPError(
            f"{who} lost another one, which failed, was killed, or whose machine stopped; {RESUME_HINT}"
        ) from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


class _Stopped(BaseException):
    """The launcher's signal; not an Exception, so that code that handles errors does not catch it."""


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
