"""The documents that ``recipes/check_packing.py`` looks at, and what must hold for their batch.

What a batch must contain is worked out here from the store, document by document, and not from the
code that packs: a fault there shows up as a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from torchtune_packing.dataset import PackedDataset
from torchtune_packing.training.data import SampleDataset
from torchtune_packing.training.loading import MicroBatch, make_loader
from torchtune_packing.types import IGNORE_INDEX

__all__ = [
    "CheckBatch",
    "Document",
    "Line",
    "check_documents",
    "check_positions",
    "check_targets",
    "read_batches",
]


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: what was checked.
        found: what was measured, as text.
        limit: what it is measured against, as text.
        passed: the verdict.
        note: a sentence for the reader, below the table; empty when there is nothing to say.
    """

    name: str
    found: str
    limit: str
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class Document:
    """A document, as the store holds it, and its place in a batch.

    Attributes:
        row: row of the batch.
        start: first position in the row.
        tokens: int64 ``[n]``.
        labels: int64 ``[n]``, unshifted.
    """

    row: int
    start: int
    tokens: torch.Tensor
    labels: torch.Tensor

    @property
    def stop(self) -> int:
        """One past the last position in the row."""
        return self.start + len(self.tokens)

    @property
    def place(self) -> tuple[int, slice]:
        """Row and positions, to index a batch with."""
        return self.row, slice(self.start, self.stop)

    @property
    def num_trained(self) -> int:
        """Targets that are trained."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class CheckBatch:
    """A batch as training would get it, and the documents that should be in it."""

    micro_batch: MicroBatch
    documents: list[Document]


_Spans = list[tuple[int, int, int]]


def _spread(items: list[int], count: int) -> list[int]:
    """``count`` of the items, evenly spread over all of them."""
    if len(items) <= count:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, count).round().astype(int)]


def _choose(dataset: PackedDataset | SampleDataset, count: int, cfg: DictConfig) -> list[list[int]]:
    """Indices of the items of each batch: ``count`` rows in all."""
    if isinstance(dataset, PackedDataset):
        documents = np.diff(dataset.plan.pack_offsets)
        several = np.flatnonzero(documents > 1).tolist()
        chosen = _spread(several or list(range(len(dataset))), count)
        rows = max(1, int(cfg.get("batch_size", None) or 1))
        return [chosen[i : i + rows] for i in range(0, len(chosen), rows)]
    batches: list[list[int]] = [[]]
    room, most = cfg.get("max_tokens", None), max(2, int(cfg.get("batch_size", None) or 2))
    taken = 0
    for index, length in enumerate(dataset.store.seq_lens.tolist()):
        full = taken + length > room if room else len(batches[-1]) == most
        if full and batches[-1]:
            if len(batches) == count:
                break
            batches.append([])
            taken = 0
        batches[-1].append(index)
        taken += length
    return batches


def _spans(dataset: PackedDataset | SampleDataset, index: int) -> _Spans:
    """Document, first token and length of everything in an item of the data set."""
    if isinstance(dataset, SampleDataset):
        return [(index, 0, int(dataset.store.seq_lens[index]))]
    plan = dataset.plan
    where = slice(plan.pack_offsets[index], plan.pack_offsets[index + 1])
    columns = (plan.documents[where], plan.starts[where], plan.lengths[where])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _place(dataset: PackedDataset | SampleDataset, items: list[int]) -> list[Document]:
    placed: list[Document] = []
    one_row = isinstance(dataset, SampleDataset)
    start = 0
    for row, index in enumerate(items):
        start = start if one_row else 0
        for document, first, length in _spans(dataset, index):
            begin = int(dataset.store.offsets[document]) + first
            cut = slice(begin, begin + length)
            tokens, labels = (
                torch.from_numpy(np.asarray(column[cut]).astype(np.int64))
                for column in (dataset.store.tokens, dataset.store.labels)
            )
            placed.append(Document(0 if one_row else row, start, tokens, labels))
            start += length
    return placed


def read_batches(
    dataset: PackedDataset | SampleDataset,
    cfg: DictConfig,
    *,
    count: int,
    padding_idx: int,
    static_shapes: bool,
) -> list[CheckBatch]:
    """Takes a few packs of a data set, in batches as training would get them.

    Args:
        dataset: packs, or single samples for padding-free rows.
        cfg: the run's config; ``batch_size`` and ``max_tokens`` size the batches.
        count: packs (or padding-free rows) in all, spread over the data set; packs with several
            documents come first, since there is nothing to keep apart in the others.
        padding_idx: token to pad with.
        static_shapes: pad to fixed shapes, as for compiled code.
    """
    chosen = _choose(dataset, count, cfg)
    batches: Any = chosen
    loader = make_loader(dataset, batches, padding_idx=padding_idx, static_shapes=static_shapes)
    return [
        CheckBatch(micro_batch, _place(dataset, items))
        for micro_batch, items in zip(loader, chosen, strict=True)
    ]


def check_documents(batches: list[CheckBatch]) -> Line:
    """Tokens and lengths of the batch are those of the store."""
    right = total = 0
    for item in batches:
        batch = item.micro_batch.batch
        for row, lengths in enumerate(batch["seq_lens"].tolist()):
            here = [document for document in item.documents if document.row == row]
            found = lengths[: len(here)] == [len(document.tokens) for document in here]
            total += len(here)
            right += sum(found and batch["tokens"][d.place].equal(d.tokens) for d in here)
    note = "" if right == total else "A batch holds other tokens or lengths than the store."
    return Line("documents as stored", f"{right} of {total}", "all", right == total, note)


def check_targets(batches: list[CheckBatch]) -> Line:
    """Each position must predict the next token of its own document, the last one nothing."""
    wrong = crossing = possible = trained = 0
    for item in batches:
        targets = item.micro_batch.batch["labels"]
        expected = torch.full_like(targets, IGNORE_INDEX)
        for document in item.documents:
            row, place = document.place
            expected[row, place.start : place.stop - 1] = document.labels[1:]
            crossing += int(targets[row, place.stop - 1] != IGNORE_INDEX)
            possible += len(document.tokens) - 1
        wrong += int((targets != expected).sum())
        trained += int((targets != IGNORE_INDEX).sum())
    note = ""
    if wrong or trained > possible:
        note = (
            f"{wrong} targets differ from the labels of the store, {crossing} of them at the last "
            f"position of a document, which must have none; there are {trained} targets where "
            f"sum(len - 1) allows {possible}."
        )
    return Line("boundary targets", f"{wrong} wrong of {trained:,}", "0", not note, note)


def check_positions(batches: list[CheckBatch], table: int | None) -> list[Line]:
    """Positions restart at 0 in every document and stay within the model's table.

    Args:
        batches: the batches.
        table: positions that the model's rotary table has; None for a model without one.
    """
    wrong = largest = 0
    for item in batches:
        positions = item.micro_batch.batch["input_pos"]
        largest = max(largest, int(positions.max()))
        for document in item.documents:
            wrong += int((positions[document.place] != torch.arange(len(document.tokens))).sum())
    restart = Line(
        "positions restart",
        f"{wrong} wrong",
        "0",
        wrong == 0,
        "" if not wrong else "Positions must count from 0 within every document.",
    )
    fits = table is None or largest < table
    limit = "no table" if table is None else f"below {table:,}"
    note = "" if fits else "Positions leave the model's rotary table; lower dataset.max_seq_len."
    return [restart, Line("largest position", f"{largest:,}", limit, fits, note)]
