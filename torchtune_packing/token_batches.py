"""Padding-free batches of a token budget instead of a sample count.

Batches are planned like packs: best fit over the sample lengths, so that each holds close to
``max_tokens`` tokens and none more. A batch goes through ``collate_flattened`` as one row.

Every sample is in one batch of the epoch, and every rank gets as many batches as every other. The
batches that are left for the last optimizer step are too few as a rule, so some of them are cut in
two, the heaviest first, until each rank has one for each micro-step:

    6 batches, 4 per step      [0 5] [3] [7 8 2 9] [1 6] | [4 10 11] [12 13]
    last step filled                                       [4] [12] [10 11] [13]

Which samples make a step decides its gradient, and how they are spread over ranks does not, since
the loss is divided by the trained tokens of the whole step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from torchtune_packing.plan import PackPlan, plan_packs
from torchtune_packing.random_order import checked_count
from torchtune_packing.sampler import at_least_1, balanced_shares, checked_place, checked_seed

__all__ = ["TokenBatchSampler"]

_Ints = npt.NDArray[np.int64]


class TokenBatchSampler(Sampler[list[int]]):
    """Deals samples to ranks in batches of at most ``max_tokens`` tokens, in whole optimizer steps.

    It stands where ``StepSampler`` stands, as the ``batch_sampler`` of a ``DataLoader``, and names
    things alike: what is a pack there is a batch of samples here. The batches of an epoch depend on
    ``(lengths, max_tokens, seed, epoch, shuffle)`` alone; only the last step depends on the number
    of ranks. So a run goes on exactly where it was, and on another number of ranks it goes through
    the same batches, but for the last step.

    Args:
        lengths: tokens of each sample, ints ``[n]``; samples of length 0 are left out.
        max_tokens: most tokens in a batch. The row's length may not pass the model's
            ``max_seq_len``.
        gradient_accumulation_steps: batches of one rank in an optimizer step.
        rank: this process, from 0.
        world_size: number of ranks.
        seed: seed of the batches, the same on all ranks.
        shuffle: plan new batches each epoch by best fit; False fills them in data order.
        balance: deal the batches of a step by attention cost, so that ranks wait less. None: as
            ``shuffle``.

    Attributes:
        packs_per_step: batches of an optimizer step, ``gradient_accumulation_steps * world_size``.
        steps_per_epoch: optimizer steps in a whole epoch.
        num_packs: batches of the current epoch, those that fill the last step included.
        num_samples: samples that hold a token.
        epoch: current epoch.
        packs_consumed: batches of this epoch that all ranks together trained on before iteration
            begins.

    Raises:
        ValueError: an argument is out of range, a sample is longer than ``max_tokens``, or there
            are fewer samples than one step needs batches.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any] | torch.Tensor,
        *,
        max_tokens: int,
        gradient_accumulation_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        balance: bool | None = None,
    ) -> None:
        self.gradient_accumulation_steps = at_least_1(
            "gradient_accumulation_steps", gradient_accumulation_steps
        )
        self.max_tokens = at_least_1("max_tokens", max_tokens)
        self.rank, self.world_size = checked_place(rank, world_size)
        self.seed = checked_seed(seed)
        self.shuffle = bool(shuffle)
        self.balance = self.shuffle if balance is None else bool(balance)
        self.packs_per_step = self.gradient_accumulation_steps * self.world_size
        self._lengths = _checked_lengths(lengths, self.max_tokens)
        self.num_samples = int(np.count_nonzero(self._lengths))
        if self.num_samples < self.packs_per_step:
            raise ValueError(
                f"the data set has {self.num_samples} samples, but one optimizer step needs "
                f"{self.packs_per_step} batches (gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} x world_size {self.world_size}) and no rank "
                "may stay without one; lower one of the two, or use more data"
            )
        self.set_epoch(0)
        self.steps_per_epoch = self.num_steps

    def set_epoch(self, epoch: int, *, packs_consumed: int = 0, costs: Any = None) -> None:
        """Goes to a position: the start of an epoch, or where a run was interrupted in it.

        Args:
            epoch: number of the epoch, from 0.
            packs_consumed: batches of this epoch that all ranks together have trained on.
            costs: not needed, the costs follow from the lengths; taken so that both samplers can be
                called alike.

        Raises:
            ValueError: an argument is out of range.
        """
        self.epoch = checked_count("epoch", epoch, "epochs count from 0")
        self.packs_consumed = checked_count(
            "packs_consumed", packs_consumed, "it is the number that the checkpoint holds"
        )
        self._plan = self._make_plan()
        self._changed = self._fill_last_step()

    def _make_plan(self) -> PackPlan:
        return plan_packs(
            self._lengths,
            max_seq_len=self.max_tokens,
            strategy="best_fit" if self.shuffle else "sequential",
            seed=self.seed,
            epoch=self.epoch,
        )

    def _fill_last_step(self) -> dict[int, _Ints]:
        """The batches that differ from the plan so that the last step has one for everyone.

        Sets ``num_packs`` and ``num_leftover``.
        """
        planned, size = len(self._plan), self.packs_per_step
        self.num_packs, self.num_leftover = max(planned, self.packs_consumed), 0
        left = planned - self.packs_consumed
        if left <= 0 or left % size == 0:
            return {}
        missing = size - left % size
        # Batches already trained on have given what they had to give if the steps are cut as they
        # were from the start; after a resume with other numbers they may not be touched.
        lowest = 0 if self.packs_consumed % size == 0 else self.packs_consumed
        samples = int(self._plan.pack_offsets[-1] - self._plan.pack_offsets[lowest])
        if samples < planned - lowest + missing:
            self.num_leftover = left % size
            return {}
        first = planned - left % size
        changed: dict[int, _Ints] = {}
        last = [self._planned(index) for index in range(first, planned)]
        while len(last) < size:
            heaviest = max(
                (i for i in range(len(last)) if len(last[i]) > 1),
                key=lambda i: self._lengths[last[i]].sum(),
                default=None,
            )
            if heaviest is not None:
                last[heaviest], half = self._halves(last[heaviest])
            else:
                # Nothing left to cut there: the nearest earlier batch of two or more gives half.
                giver = first - 1
                while len(changed.get(giver, self._planned(giver))) < 2:
                    giver -= 1
                changed[giver], half = self._halves(changed.get(giver, self._planned(giver)))
            last.append(half)
        self.num_packs = planned + missing
        return changed | {first + i: batch for i, batch in enumerate(last)}

    def _planned(self, index: int) -> _Ints:
        offsets = self._plan.pack_offsets
        return self._plan.documents[offsets[index] : offsets[index + 1]]

    def _halves(self, samples: _Ints) -> tuple[_Ints, _Ints]:
        """Two parts of about as many tokens; both hold a sample, as ``samples`` has two or more."""
        order = np.argsort(-self._lengths[samples], kind="stable")
        return samples[order[::2]], samples[order[1::2]]

    def batch(self, index: int) -> list[int]:
        """The samples of one batch of the current epoch, 0 to ``num_packs - 1``."""
        changed = self._changed.get(index)
        return (self._planned(index) if changed is None else changed).tolist()

    @property
    def num_steps(self) -> int:
        """Optimizer steps from the current position to the end of the epoch."""
        return (self.num_packs - self.packs_consumed) // self.packs_per_step

    def order(self) -> _Ints:
        """Numbers of the current epoch's batches in the order of training; see ``batch``."""
        return np.arange(self.num_packs)

    def checksum(self) -> int:
        """A number that differs when ranks disagree on this epoch's batches or on their sizes."""
        facts = np.array(
            [self.packs_per_step, self.world_size, self.packs_consumed, self.balance], np.int64
        )
        value = zlib.crc32(facts.tobytes())
        for array in (self._plan.documents, self._plan.pack_offsets, self._lengths):
            value = zlib.crc32(array.tobytes(), value)
        return value

    def __len__(self) -> int:
        """Batches of this rank from the current position to the end of the epoch."""
        return self.num_steps * self.gradient_accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's batches, lists of sample indices."""
        shape = (self.gradient_accumulation_steps, self.world_size)
        for step in range(self.num_steps):
            first = self.packs_consumed + step * self.packs_per_step
            batches = [self.batch(first + i) for i in range(self.packs_per_step)]
            shares = np.arange(self.packs_per_step).reshape(shape)
            if self.balance:
                costs = np.array([(self._lengths[batch] ** 2).sum() for batch in batches])
                shares = balanced_shares(
                    costs[None],
                    batch_size=1,
                    accumulation=self.gradient_accumulation_steps,
                    world_size=self.world_size,
                ).reshape(shape)
            for micro_step in shares:
                yield batches[micro_step[self.rank]]


def _checked_lengths(lengths: Any, max_tokens: int) -> _Ints:
    """The lengths as int64 ``[n]``, none longer than a batch."""
    found = lengths.cpu().numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    if found.ndim != 1 or (found.size and (found.dtype.kind not in "iu" or found.min() < 0)):
        raise ValueError(
            f"lengths has the shape {found.shape} and the type {found.dtype}, but it must hold one "
            "number of tokens, 0 or more, for each sample"
        )
    if found.size and found.max() > max_tokens:
        index = int(found.argmax())
        raise ValueError(
            f"sample {index} is too long for a batch ({found[index]} > {max_tokens} tokens); raise "
            "max_tokens, or set the tokenizer's max_seq_len so that samples are truncated"
        )
    return found.astype(np.int64)
