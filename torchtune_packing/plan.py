"""Plans packs from lengths alone: which span of which document lies in which pack.

A plan is made before any token is moved, from one int per document, and by every rank alike. Two
strategies::

    lengths  5 6 2 3                max_seq_len=8

    best_fit     [6 2] [5 3]        fullest packs, new neighbours every epoch
    sequential   [5] [6 2] [3]      data order, as torchtune 0.6.1 packs

and ``split_across_pack=True``, which lays documents end to end and cuts them where a pack ends::

    split        [5 3.] [.3 2 3]    the document of 6 tokens is cut after 3

Best fit is best-fit decreasing, worked out per distinct length and not per document; see
:mod:`torchtune_packing.best_fit`. Documents of equal length are interchangeable there, so the seed
and the epoch decide which of them goes where: the number of packs depends on the lengths alone and
is the same in every epoch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtune_packing.best_fit import best_fit_bins
from torchtune_packing.random_order import (
    checked_count,
    random_bits,
    random_order,
    sort_in_groups,
)

__all__ = ["OVERLONG_POLICIES", "STRATEGIES", "PackPlan", "plan_packs"]

STRATEGIES = ("best_fit", "sequential")
OVERLONG_POLICIES = ("error", "drop", "truncate", "split")

_Ints = npt.NDArray[np.int64]

# What random bits are used for; the sampler has a number of its own.
_NEIGHBOURS, _PACK_ORDER, _ORDER_IN_PACK = 1, 2, 3


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Spans of documents, pack by pack.

    ::

        lengths 4 8, max_seq_len=6, split_across_pack=True

        documents     0 1 | 1        pack 0 holds document 0 and the first 2 tokens of document 1,
        starts        0 0 | 2        pack 1 the other 6
        lengths       4 2 | 6
        pack_offsets  0 2 3

    Every token is in one span, or counted as dropped, truncated or unused: ``num_tokens`` and those
    three add up to the tokens that were given. The arrays are read-only.

    Attributes:
        documents: index of each span's document among the lengths given, int64 ``[m]``.
        starts: where the span begins in its document, int64 ``[m]``.
        lengths: tokens of the span, at least 1, int64 ``[m]``.
        pack_offsets: int64 ``[p + 1]``; pack i has the spans
            ``pack_offsets[i]:pack_offsets[i + 1]``.
        max_seq_len: most tokens in a pack.
        strategy: "best_fit" or "sequential", as asked for.
        num_documents: documents with at least one token.
        num_empty: lengths of 0, which are skipped.
        num_dropped: overlong documents left out (``overlong="drop"``).
        num_dropped_tokens: their tokens.
        num_truncated: overlong documents cut short (``overlong="truncate"``).
        num_truncated_tokens: tokens behind those cuts.
        num_split: documents of which the packs hold several spans.
        num_cuts: spans that begin inside a document. Each of them costs the target of its first
            token, which could only be predicted from the span before it.
        num_unused: documents of which ``max_packs`` left out every token.
        num_unused_tokens: tokens left out by ``max_packs``.
    """

    documents: _Ints
    starts: _Ints
    lengths: _Ints
    pack_offsets: _Ints
    max_seq_len: int
    strategy: str
    num_documents: int
    num_empty: int = 0
    num_dropped: int = 0
    num_dropped_tokens: int = 0
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    num_split: int = 0
    num_cuts: int = 0
    num_unused: int = 0
    num_unused_tokens: int = 0

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.pack_offsets) - 1

    def __repr__(self) -> str:
        return (
            f"PackPlan({self.strategy}: {self.num_documents:,} documents in {len(self):,} packs of "
            f"{self.max_seq_len:,}, fill {100 * self.fill:.2f} %)"
        )

    def seq_lens(self, pack: int) -> _Ints:
        """Lengths of the spans in one pack, int64 ``[d]``.

        Args:
            pack: number of the pack; negative counts from the end.

        Raises:
            IndexError: there is no such pack.
        """
        index = operator.index(pack)
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {pack} does not exist; there are {len(self)} packs")
        index %= len(self)
        return self.lengths[self.pack_offsets[index] : self.pack_offsets[index + 1]]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in all packs."""
        return int(self.lengths.sum())

    @property
    def fill(self) -> float:
        """Share of the packs' positions that hold real tokens."""
        return self.num_tokens / (len(self) * self.max_seq_len)

    @cached_property
    def pack_lengths(self) -> _Ints:
        """Tokens in each pack, int64 ``[p]``."""
        return np.add.reduceat(self.lengths, self.pack_offsets[:-1])

    @cached_property
    def max_documents(self) -> int:
        """Most spans in a pack."""
        return int(np.diff(self.pack_offsets).max())

    @cached_property
    def attention_cost(self) -> _Ints:
        """Cost of attention in each pack, ``sum(len**2)`` over its spans, int64 ``[p]``."""
        return np.add.reduceat(self.lengths**2, self.pack_offsets[:-1])


def plan_packs(
    lengths: Sequence[int] | npt.NDArray[Any] | torch.Tensor,
    *,
    max_seq_len: int,
    strategy: str = "best_fit",
    overlong: str = "error",
    seed: int = 0,
    epoch: int = 0,
    max_packs: int | None = None,
    split_across_pack: bool = False,
) -> PackPlan:
    """Plans which documents share a pack.

    The plan is a pure function of the arguments: the same on every rank, machine and numpy version.

    Under "best_fit" the packs, and the documents within each, come in an order drawn by seed and
    epoch. As the algorithm opens them, packs begin with the longest documents and end with the
    shortest; an unshuffled run would train on a curriculum nobody asked for, and ``max_packs``
    would keep the long documents only. So any stretch of packs is a fair sample. "sequential" keeps
    data order and takes no notice of seed and epoch.

    Args:
        lengths: tokens of each document, ints ``[n]``; zeros are skipped.
        max_seq_len: most tokens in a pack.
        strategy: "best_fit" (fullest packs) or "sequential" (next fit in data order).
        overlong: what becomes of documents longer than ``max_seq_len``: "error", "drop",
            "truncate" (keeps the first ``max_seq_len`` tokens) or "split". With "best_fit", "split"
            cuts overlong documents into pieces of ``max_seq_len`` and a rest; with "sequential" it
            is the same as ``split_across_pack=True``.
        seed: decides under "best_fit" which documents of equal length go where, and in what order.
        epoch: the same for each epoch; every epoch has as many packs as every other.
        max_packs: keeps so many packs, the first ones; what is left out is counted.
        split_across_pack: lay documents end to end in data order and cut them where a pack ends,
            whatever the strategy. Documents that are too long are cut as often as needed, unless
            ``overlong`` says "drop" or "truncate".

    Raises:
        ValueError: an argument is out of range, a document is too long and ``overlong="error"``, or
            there is no document to pack.
    """
    sizes = _checked_lengths(lengths)
    limit = _checked_limit("max_seq_len", max_seq_len, "the number of tokens in a pack")
    if max_packs is not None:
        max_packs = _checked_limit("max_packs", max_packs, "None for all packs, or their number")
    _check_choice("strategy", strategy, STRATEGIES)
    _check_choice("overlong", overlong, OVERLONG_POLICIES)
    seed = checked_count("seed", seed, "set it to the same number on every rank")
    epoch = checked_count("epoch", epoch, "epochs count from 0")

    documents = np.flatnonzero(sizes)
    if not len(documents):
        raise ValueError(
            f"no non-empty samples: {len(sizes):,} lengths were given and none is above 0; check "
            "the data source and its filters"
        )
    cut_at_pack_ends = split_across_pack or (strategy, overlong) == ("sequential", "split")
    counts = {"num_documents": len(documents), "num_empty": len(sizes) - len(documents)}
    sizes = sizes[documents]
    is_overlong = sizes > limit
    if overlong == "drop":
        counts["num_dropped"] = int(is_overlong.sum())
        counts["num_dropped_tokens"] = int(sizes[is_overlong].sum())
        documents, sizes = documents[~is_overlong], sizes[~is_overlong]
        if not len(documents):
            raise ValueError(
                f"no non-empty samples are left: all {len(is_overlong):,} are longer than "
                f"max_seq_len={limit} and overlong='drop'; raise max_seq_len, or set overlong to "
                "'truncate' or 'split'"
            )
    elif overlong == "truncate":
        counts["num_truncated"] = int(is_overlong.sum())
        counts["num_truncated_tokens"] = int((sizes[is_overlong] - limit).sum())
        sizes = np.minimum(sizes, limit)
    elif overlong == "error" and not cut_at_pack_ends and is_overlong.any():
        first, number = int(is_overlong.argmax()), int(is_overlong.sum())
        raise ValueError(
            f"sample {documents[first]} is too long for a pack ({sizes[first]} > {limit} tokens), "
            f"one of {number:,} overlong among {len(is_overlong):,} samples; raise max_seq_len, or "
            "set overlong to 'drop', 'truncate' or 'split'"
        )

    if cut_at_pack_ends:
        owners, starts, pieces, pack_offsets = _end_to_end(sizes, limit)
    elif strategy == "sequential":
        owners, starts, pieces = np.arange(len(sizes)), np.zeros(len(sizes), np.int64), sizes
        pack_offsets = _next_fit(sizes, limit)
    else:
        owners, starts, pieces = _cut_overlong(sizes, limit)
        order, pack_offsets = _best_fit(pieces, limit, seed, epoch)
        owners, starts, pieces = owners[order], starts[order], pieces[order]

    if max_packs is not None and max_packs < len(pack_offsets) - 1:
        pack_offsets = pack_offsets[: max_packs + 1]
        kept = slice(pack_offsets[-1])
        owners, starts, pieces = owners[kept], starts[kept], pieces[kept]
        counts["num_unused"] = len(sizes) - int(np.count_nonzero(np.bincount(owners)))
        counts["num_unused_tokens"] = int(sizes.sum() - pieces.sum())
    counts["num_cuts"] = int(np.count_nonzero(starts))
    if counts["num_cuts"]:
        counts["num_split"] = int(np.count_nonzero(np.bincount(owners) > 1))

    documents = documents[owners]
    for array in (documents, starts, pieces, pack_offsets):
        array.setflags(write=False)
    return PackPlan(
        documents, starts, pieces, pack_offsets, max_seq_len=limit, strategy=strategy, **counts
    )


def _end_to_end(sizes: _Ints, limit: int) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Cuts documents laid end to end where a pack ends: owners, starts, pieces, pack offsets."""
    ends = np.cumsum(sizes)
    begins = ends - sizes
    first_pack = begins // limit
    num_pieces = (ends - 1) // limit - first_pack + 1
    owners = np.repeat(np.arange(len(sizes)), num_pieces)
    piece = np.arange(len(owners)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    pack = first_pack[owners] + piece
    piece_begins = np.maximum(begins[owners], pack * limit)
    piece_ends = np.minimum(ends[owners], (pack + 1) * limit)
    pack_offsets = np.searchsorted(pack, np.arange(pack[-1] + 2))
    return owners, piece_begins - begins[owners], piece_ends - piece_begins, pack_offsets


def _next_fit(sizes: _Ints, limit: int) -> _Ints:
    """Offsets of packs that are filled in data order, each until the next document is too long."""
    ends = np.cumsum(sizes)
    # For each document, the first one that no longer fits into a pack that begins with it.
    following = np.searchsorted(ends, ends - sizes + limit, side="right")
    offsets = [0]
    while offsets[-1] < len(sizes):
        offsets.append(following.item(offsets[-1]))
    return np.array(offsets)


def _cut_overlong(sizes: _Ints, limit: int) -> tuple[_Ints, _Ints, _Ints]:
    """Cuts overlong documents into pieces of ``limit`` and a rest: owners, starts, pieces."""
    num_pieces = -(-sizes // limit)
    if num_pieces.max() == 1:
        return np.arange(len(sizes)), np.zeros(len(sizes), np.int64), sizes
    owners = np.repeat(np.arange(len(sizes)), num_pieces)
    piece = np.arange(len(owners)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = piece * limit
    return owners, starts, np.minimum(sizes[owners] - starts, limit)


def _best_fit(sizes: _Ints, limit: int, seed: int, epoch: int) -> tuple[_Ints, _Ints]:
    """Order of the documents, pack by pack, and the pack offsets."""
    n, draw = len(sizes), {"seed": seed, "epoch": epoch}
    longest = int(sizes.max())
    # Longest first, and those of equal length in an order that is new in every epoch.
    below, order = sort_in_groups(
        longest - sizes, np.arange(n), random_bits(n, stream=_NEIGHBOURS, **draw)
    )
    firsts = np.flatnonzero(np.diff(below, prepend=-1))
    counts = np.diff(firsts, append=n)
    bins, num_packs = best_fit_bins((longest - below[firsts]).tolist(), counts.tolist(), limit)
    packs = random_order(num_packs, stream=_PACK_ORDER, **draw)[bins]
    packs, order = sort_in_groups(packs, order, random_bits(n, stream=_ORDER_IN_PACK, **draw))
    return order, np.searchsorted(packs, np.arange(num_packs + 1))


def _checked_lengths(lengths: Any) -> _Ints:
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.detach().cpu().numpy()
    try:
        found = np.asarray(lengths)
    except (TypeError, ValueError) as error:
        raise ValueError(f"lengths must be one whole number per document: {error}") from None
    if found.ndim != 1:
        raise ValueError(
            f"lengths has the shape {found.shape}; pass one whole number per document, shape [n]"
        )
    if not found.size:
        return np.zeros(0, dtype=np.int64)
    if found.dtype.kind not in "iu":
        raise ValueError(
            f"lengths holds {found.dtype} values such as {found[0]!r}; pass whole numbers of tokens"
        )
    sizes = found.astype(np.int64, copy=False)
    if sizes.min() < 0:
        index = int((sizes < 0).argmax())
        raise ValueError(
            f"sample {index} has the length {found[index]}; lengths are numbers of tokens, at "
            "least 0"
        )
    return sizes


def _checked_limit(name: str, value: Any, meaning: str) -> int:
    number = isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__")
    if number or value <= 0:
        raise ValueError(f"{name} is {value!r}; set it to {meaning}, at least 1")
    return operator.index(value)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {value!r}; choose one of {listed}")
