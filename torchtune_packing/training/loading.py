"""From an opened data set to the micro-batches of a rank: the CPU end of a recipe.

A loader yields CPU tensors only and can run in worker processes; masks are made later, on the
device. It is the same for packs and for padding-free rows: the collate follows the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from torchtune_packing.collate import collate_flattened, collate_packed
from torchtune_packing.dataset import PackedDataset
from torchtune_packing.training.metrics import StepCounts
from torchtune_packing.types import PackedBatch

__all__ = ["CountedCollate", "EvenBatches", "MicroBatch", "make_loader"]

#: Slots for documents grow by this many, so that compiled code meets few different shapes.
_DOCUMENT_SLOTS = 64

#: Padding-free rows grow by this many positions where code is compiled for each length.
_ROW_STEP = 512


class MicroBatch:
    """One batch with the counts that only its samples could tell.

    Attributes:
        batch: ``tokens``, ``labels`` (aligned targets), ``input_pos``, ``seq_lens``; CPU tensors.
        real_lengths: int64 ``[b]``, tokens of real documents in each row.
        num_documents: documents, without the padding tail.
    """

    def __init__(self, batch: PackedBatch, real_lengths: torch.Tensor, num_documents: int) -> None:
        self.batch = batch
        self.real_lengths = real_lengths
        self.num_documents = num_documents

    def pin_memory(self) -> MicroBatch:
        """Pins the tensors, called by a DataLoader with ``pin_memory=True``."""
        for key, value in self.batch.items():
            if isinstance(value, torch.Tensor):
                self.batch[key] = value.pin_memory()  # type: ignore[literal-required]
        return self

    def counts(self, num_trained: int, divisor: float) -> StepCounts:
        """This batch's part of its step's counts."""
        return StepCounts(
            capacity=self.batch["tokens"].numel(),
            real=int(self.real_lengths.sum()),
            trained=num_trained,
            documents=self.num_documents,
            divisor=divisor,
        )


class CountedCollate:
    """Collates packs, or samples that nobody packed, and counts what is real in them.

    Args:
        packed: True for packs (``collate_packed``), False for samples (``collate_flattened``).
        padding_idx: token id to pad with.
        ignore_idx: label of what is not trained.
        static: shapes that never change, for compiled code: ``pad_to`` and ``documents``.
        row_step: rows of samples are padded to a multiple of this.
    """

    def __init__(
        self,
        *,
        packed: bool,
        padding_idx: int,
        ignore_idx: int,
        static: tuple[int, int] | None = None,
        row_step: int = 1,
    ) -> None:
        self.packed = packed
        self.padding_idx = padding_idx
        self.ignore_idx = ignore_idx
        self.static = static
        self.row_step = row_step

    def __call__(self, samples: Sequence[Any]) -> MicroBatch:
        """Makes the batch of some packs or samples."""
        common: dict[str, Any] = {"shift_labels": True, "mask": None}
        batch: PackedBatch
        if self.packed:
            if self.static is not None:
                common["pad_to"], common["pad_documents_to"] = self.static
            batch = collate_packed(samples, self.padding_idx, self.ignore_idx, **common)
            documents = sum(len(sample["seq_lens"]) for sample in samples)
        else:
            common["pad_to_multiple_of"] = self.row_step
            batch = collate_flattened(samples, self.padding_idx, self.ignore_idx, **common)
            documents = sum(len(sample["tokens"]) > 0 for sample in samples)
        lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
        return MicroBatch(
            batch, lengths if self.packed else lengths.sum(0, keepdim=True), documents
        )


class EvenBatches(Sampler[list[int]]):
    """Every item exactly once over all ranks, in order, with as many batches on every rank.

    A sharded model needs all ranks in each forward. Where the items do not divide, the ranks that
    have run out repeat their share's last batch; ``num_counted`` tells how many of a rank's
    batches are its own and count.

    Args:
        num_items: packs or samples.
        batch_size: items per batch; the last one may be smaller.
        rank: this process.
        world_size: all processes.
    """

    def __init__(self, num_items: int, *, batch_size: int, rank: int = 0, world_size: int = 1):
        starts = range(0, num_items, batch_size)
        batches = [list(range(i, min(i + batch_size, num_items))) for i in starts]
        own = batches[rank::world_size]
        self.num_counted = len(own)
        rounds = -(-len(batches) // world_size)
        self._batches = own + [batches[-1]] * (rounds - len(own))

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the index lists of this rank."""
        return iter(self._batches)

    def __len__(self) -> int:
        """Batches per rank."""
        return len(self._batches)


def make_loader(
    dataset: Dataset[Any],
    batches: Sampler[list[int]],
    *,
    padding_idx: int,
    ignore_idx: int = -100,
    num_workers: int = 0,
    pin_memory: bool = False,
    static_shapes: bool = False,
    collate: Callable[[Sequence[Any]], MicroBatch] | None = None,
) -> DataLoader[Any]:
    """A loader of ``MicroBatch`` for one epoch.

    Args:
        dataset: a ``PackedDataset``, or any map-style data set of samples
            for padding-free rows.
        batches: a batch sampler (``StepSampler``, ``TokenBatchSampler``, ``EvenBatches``).
        padding_idx: token id to pad with.
        ignore_idx: label of what is not trained.
        num_workers: loader processes; 0 loads in this one.
        pin_memory: pin the tensors for copies to a GPU.
        static_shapes: pad every row to ``max_seq_len`` and the documents to a fixed number, for
            compiled code, and rows without padding to a multiple of 512; otherwise rows are as
            long as the longest of their batch.
        collate: a collate of your own that returns a ``MicroBatch``.
    """
    packed = isinstance(dataset, PackedDataset)
    static = None
    if static_shapes and isinstance(dataset, PackedDataset):
        slots = dataset.max_documents + 1  # and the padding tail
        static = (dataset.max_seq_len, -(-slots // _DOCUMENT_SLOTS) * _DOCUMENT_SLOTS)
    if collate is None:
        collate = CountedCollate(
            packed=packed,
            padding_idx=padding_idx,
            ignore_idx=ignore_idx,
            static=static,
            row_step=_ROW_STEP if static_shapes else 1,
        )
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )
