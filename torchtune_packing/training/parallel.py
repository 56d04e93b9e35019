"""The few facts about ranks that a recipe needs, the same for one process and for many.

A recipe started by ``tune run recipes/x.py`` has no process group; one started with
``--nproc_per_node`` (or any torchrun flags) does. ``Ranks`` hides the difference, so that the
training loop is written once. The reductions carry sums only: each count enters them once, freshly
made for its step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["Ranks"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among the processes of the run.

    Attributes:
        rank: 0 to ``world_size - 1``.
        world_size: number of processes.
        device: the device this process trains on.
    """

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def start(cls, device: torch.device, *, timeout_s: float | None = None) -> Ranks:
        """Joins the process group of the launcher, or stands alone when there is none.

        Args:
            device: "cpu" uses gloo, "cuda" nccl (with gloo beside it for CPU tensors).
            timeout_s: limit of a collective in seconds; None keeps torch's default.
        """
        if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
            return cls(0, 1, device)
        if not dist.is_initialized():
            backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
            timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
            dist.init_process_group(backend, timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        """True on the one process that logs and writes."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """True when there is a process group, even of one process."""
        return dist.is_initialized()

    def sum(self, *values: float) -> list[float]:
        """Sums each value over the ranks, in float64 on the CPU (counts up to 2**53 are exact)."""
        if self.world_size == 1:
            return [float(v) for v in values]
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        box: list[T | None] = [None] * self.world_size
        dist.all_gather_object(box, value)
        return box  # type: ignore[return-value]

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def stop(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
