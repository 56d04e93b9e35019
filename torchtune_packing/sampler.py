"""The order of packs: which rank trains on which pack, when, and where a run goes on.

Three layers, each a pure function of what is below it, so that every rank works out the same:

    order    all packs of the epoch, drawn by (seed, epoch)    6 2 5 0 7 1 4 3
    steps    stretches of packs_per_step                       6 2 5 0   |  7 1 4 3
    shares   micro-batches of each rank within a step          rank 0:  [6] [5] | [7] [4]
                                                               rank 1:  [2] [0] | [1] [3]

A position is ``(epoch, packs_consumed)`` and knows nothing of ranks: the steps that follow are cut
from the rest of the same order, also on another number of ranks.

Balancing touches the last layer only. The time of a micro-step is that of its slowest rank, and the
part of it that differs from rank to rank is attention, ``sum(len**2)`` of a pack. So the packs of a
step are sorted by cost and neighbours form a micro-step; with several packs per rank, the heaviest
pack goes to the rank that has least so far (R. L. Graham, "Bounds on multiprocessing timing
anomalies", 1969). Which packs make up a step stays as it is, and with them its gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from torchtune_packing.random_order import Stream, checked_count, random_order

__all__ = ["StepSampler", "balanced_shares", "epoch_order"]


def epoch_order(
    num_packs: int, *, seed: int, epoch: int, shuffle: bool = True
) -> npt.NDArray[np.int64]:
    """The packs of an epoch in the order of training, int64 ``[num_packs]``.

    Args:
        num_packs: number of packs.
        seed: seed of the run, the same on all ranks.
        epoch: number of the epoch, from 0.
        shuffle: draw the order by seed and epoch; False keeps the order of the plan.
    """
    if not shuffle:
        return np.arange(num_packs)
    return random_order(num_packs, seed=seed, epoch=epoch, stream=Stream.EPOCH_ORDER)


def balanced_shares(
    costs: npt.NDArray[Any], *, batch_size: int, accumulation: int, world_size: int
) -> npt.NDArray[np.int64]:
    """Deals the packs of optimizer steps so that ranks have as little as possible to wait for.

        costs 9 1 8 2, accumulation 2, 2 ranks     in turn     rank 0  9 8   waits 0 0
                                                               rank 1  1 2         8 6
                                                   balanced    rank 0  9 1   waits 0 1
                                                               rank 1  8 2         1 0

    Micro-steps come heaviest first, so memory peaks at the start of a step. Within a micro-step the
    heavier shares go to the ranks that have had least of this step, which keeps the sums over the
    step close too, for set-ups that wait only at its end.

    Args:
        costs: cost of each pack of each step, ``[n, P]`` with P the product of the three numbers.
        batch_size: packs of one rank in one micro-step.
        accumulation: micro-steps of a step.
        world_size: number of ranks.

    Returns:
        Positions within the step, int64 ``[n, accumulation, world_size, batch_size]``; each row of
        ``[P]`` is a permutation.
    """
    shape = (len(costs), accumulation, world_size, batch_size)
    # Stable, so that equal costs come out alike on every machine.
    order = np.argsort(-costs, axis=1, kind="stable")
    order = order.reshape(-1, accumulation, batch_size, world_size)
    sorted_costs = np.take_along_axis(costs, order.reshape(len(costs), -1), axis=1)
    sorted_costs = sorted_costs.reshape(order.shape)

    shares = np.empty(shape, dtype=np.int64)
    sums = np.zeros((len(costs), accumulation, world_size), dtype=costs.dtype)
    for row in range(batch_size):
        lightest_first = np.argsort(sums, axis=2, kind="stable")
        np.put_along_axis(shares[..., row], lightest_first, order[:, :, row], axis=2)
        more = np.zeros_like(sums)
        np.put_along_axis(more, lightest_first, sorted_costs[:, :, row], axis=2)
        sums += more

    dealt = np.empty_like(shares)
    totals = np.zeros((len(costs), world_size), dtype=costs.dtype)
    for micro in range(accumulation):
        heaviest_first = np.argsort(-sums[:, micro], axis=1, kind="stable")
        lightest_first = np.argsort(totals, axis=1, kind="stable")
        chosen = np.empty_like(heaviest_first)
        np.put_along_axis(chosen, lightest_first, heaviest_first, axis=1)
        dealt[:, micro] = np.take_along_axis(shares[:, micro], chosen[..., None], axis=1)
        totals += np.take_along_axis(sums[:, micro], chosen, axis=1)
    return dealt


class StepSampler(Sampler[list[int]]):
    """Deals packs to ranks in whole optimizer steps; a ``batch_sampler`` for a ``DataLoader``.

    Iterating yields this rank's micro-batches for the rest of the epoch, the
    ``gradient_accumulation_steps`` micro-batches of one step after those of the other. All ranks
    yield equally many. Packs that do not fill a last step are left out of this epoch and counted;
    shuffled, every epoch leaves out others.

    Args:
        num_packs: packs of an epoch.
        batch_size: packs of one rank in one micro-batch.
        gradient_accumulation_steps: micro-batches of one rank in an optimizer step.
        rank: this process, from 0.
        world_size: number of ranks.
        seed: seed of the order, the same on all ranks.
        shuffle: draw the order anew each epoch; False keeps the order of the plan.
        balance: deal the packs of a step by cost, so that ranks wait less. None: as ``shuffle``, so
            that an unshuffled run keeps the plain order. Without costs, the plain order too.
        costs: cost of each pack, ``[num_packs]``: ``plan.attention_cost``.

    Attributes:
        num_packs: as given.
        packs_per_step: ``batch_size * gradient_accumulation_steps * world_size``.
        steps_per_epoch: optimizer steps in a whole epoch, ``num_packs // packs_per_step``.
        epoch: current epoch.
        packs_consumed: packs of this epoch that all ranks together trained on before iteration
            begins.

    Raises:
        ValueError: an argument is out of range, or there are fewer packs than one step needs.
    """

    def __init__(
        self,
        num_packs: int,
        *,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        balance: bool | None = None,
        costs: Sequence[float] | npt.NDArray[Any] | None = None,
    ) -> None:
        self.num_packs = checked_count("num_packs", num_packs, "pass the length of the data set")
        self.batch_size = at_least_1("batch_size", batch_size)
        self.gradient_accumulation_steps = at_least_1(
            "gradient_accumulation_steps", gradient_accumulation_steps
        )
        self.rank, self.world_size = checked_place(rank, world_size)
        self.seed = checked_seed(seed)
        self.shuffle = bool(shuffle)
        self.balance = self.shuffle if balance is None else bool(balance)
        self.packs_per_step = self.batch_size * self.gradient_accumulation_steps * self.world_size
        self.steps_per_epoch = self.num_packs // self.packs_per_step
        if not self.steps_per_epoch:
            raise ValueError(
                f"the data set has {self.num_packs} packs, but one optimizer step needs "
                f"{self.packs_per_step} (batch_size {self.batch_size} x "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} x world_size "
                f"{self.world_size}); lower one of the three, use more data, or make more packs "
                "with a smaller max_seq_len"
            )
        self._costs: npt.NDArray[Any] | None = None
        self.set_epoch(0, costs=costs)

    def set_epoch(
        self,
        epoch: int,
        *,
        packs_consumed: int = 0,
        costs: Sequence[float] | npt.NDArray[Any] | None = None,
    ) -> None:
        """Goes to a position: the start of an epoch, or where a run was interrupted in it.

        The rest of the epoch is ``num_packs - packs_consumed`` packs in the same order, whatever
        the number of ranks, the batch size and the accumulation were that consumed the others. It
        is cut into ``(num_packs - packs_consumed) // packs_per_step`` steps; so after a resume with
        other numbers the epoch may have another number of steps in all, and another leftover.

        Args:
            epoch: number of the epoch, from 0.
            packs_consumed: packs of this epoch that all ranks together have trained on.
            costs: cost of each pack in this epoch's plan, ``[num_packs]``; None keeps the last
                ones.

        Raises:
            ValueError: an argument is out of range.
        """
        self.epoch = checked_count("epoch", epoch, "epochs count from 0")
        self.packs_consumed = checked_count(
            "packs_consumed", packs_consumed, "it is the number that the checkpoint holds"
        )
        if self.packs_consumed > self.num_packs:
            raise ValueError(
                f"packs_consumed is {packs_consumed}, but the epoch has {self.num_packs} packs; "
                "resume with the data set and max_seq_len that the checkpoint was made with"
            )
        if costs is not None:
            self._costs = _checked_costs(costs, self.num_packs)

    @property
    def num_steps(self) -> int:
        """Optimizer steps from the current position to the end of the epoch."""
        return (self.num_packs - self.packs_consumed) // self.packs_per_step

    @property
    def num_leftover(self) -> int:
        """Packs of the current epoch that are left out, too few for a step."""
        return (self.num_packs - self.packs_consumed) % self.packs_per_step

    def order(self) -> npt.NDArray[np.int64]:
        """All packs of the current epoch in the order of training, int64 ``[num_packs]``."""
        return epoch_order(self.num_packs, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)

    def checksum(self) -> int:
        """A number that differs when ranks disagree on this epoch's order, costs or sizes.

        Compare it over ranks before training: ranks whose packs differ would train on some twice
        and on others never.
        """
        sizes = (self.num_packs, self.batch_size, self.gradient_accumulation_steps)
        facts = np.array([*sizes, self.world_size, self.packs_consumed, self.balance], np.int64)
        value = zlib.crc32(self.order().tobytes(), zlib.crc32(facts.tobytes()))
        if self.balance and self._costs is not None:
            value = zlib.crc32(self._costs.tobytes(), value)
        return value

    def __len__(self) -> int:
        """Micro-batches of this rank from the current position to the end of the epoch."""
        return self.num_steps * self.gradient_accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's micro-batches, lists of ``batch_size`` pack indices."""
        costs = self._costs if self.balance else None
        order = self.order()[self.packs_consumed :]
        size = self.packs_per_step
        for step in range(self.num_steps):
            packs = order[step * size : (step + 1) * size]
            for micro_batch in self._shares(packs, costs)[:, self.rank]:
                yield micro_batch.tolist()

    def _shares(
        self, packs: npt.NDArray[np.int64], costs: npt.NDArray[Any] | None
    ) -> npt.NDArray[np.int64]:
        """The packs of a step, ``[accumulation, world_size, batch_size]``."""
        shape = (self.gradient_accumulation_steps, self.world_size, self.batch_size)
        if costs is None:
            return packs.reshape(shape)
        shares = balanced_shares(
            costs[packs][None],
            batch_size=self.batch_size,
            accumulation=self.gradient_accumulation_steps,
            world_size=self.world_size,
        )
        return packs[shares[0]]


def at_least_1(name: str, value: Any) -> int:
    """The value as a plain int, or one clear sentence when it is no whole number from 1 up."""
    number = checked_count(name, value, "set it to 1 or more")
    if not number:
        raise ValueError(f"{name} is 0; set it to 1 or more")
    return number


def checked_place(rank: Any, world_size: Any) -> tuple[int, int]:
    """Rank and world size as plain ints, or one clear sentence when they cannot belong together."""
    size = at_least_1("world_size", world_size)
    number = checked_count("rank", rank, "ranks count from 0")
    if number >= size:
        raise ValueError(
            f"rank is {rank}, but with world_size={world_size} ranks run from 0 to {size - 1}; "
            "pass torch.distributed's rank and world size"
        )
    return number, size


def checked_seed(seed: Any) -> int:
    """The seed of an order as a plain int, or one clear sentence."""
    return checked_count(
        "seed", seed, "with several ranks, draw one on rank 0 and broadcast it to the others"
    )


def _checked_costs(costs: Any, num_packs: int) -> npt.NDArray[Any]:
    found = np.asarray(costs)
    if found.shape != (num_packs,) or found.dtype.kind not in "iuf":
        raise ValueError(
            f"costs has the shape {found.shape} and the type {found.dtype}, but it must hold one "
            f"number for each of the {num_packs} packs; pass plan.attention_cost of this epoch"
        )
    if not np.isfinite(found).all() or found.min() < 0:
        raise ValueError("costs holds negative or non-finite numbers; pass plan.attention_cost")
    # Unsigned numbers cannot be negated, which is how the heaviest packs come first.
    return found.astype(np.float64 if found.dtype.kind == "f" else np.int64)
