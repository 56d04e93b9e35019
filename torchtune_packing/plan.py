"""Plans packs from lengths alone: which span of which document lies in which pack.

A plan is made before any token is moved, from one int per document, and by every rank alike. Two
strategies:

    lengths  5 6 2 3                max_seq_len=8

    best_fit     [6 2] [5 3]        fullest packs, new neighbours every epoch
    sequential   [5] [6 2] [3]      data order, as torchtune 0.6.1 packs

and ``split_across_pack=True``, which lays documents end to end and cuts them where a pack ends:

    split        [5 3.] [.3 2 3]    the document of 6 tokens is cut after 3

Best fit is best-fit decreasing, worked out per distinct length and not per document; see
``torchtune_packing.best_fit``. Documents of equal length are interchangeable there, so the seed
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

from torchtune_packing.random_order import checked_count
from torchtune_packing.strategies import Spans, best_fit, end_to_end, next_fit

__all__ = ["OVERLONG_POLICIES", "STRATEGIES", "PackPlan", "plan_packs"]

STRATEGIES = ("best_fit", "sequential")
OVERLONG_POLICIES = ("error", "drop", "truncate", "split")

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Spans of documents, pack by pack.

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

    documents, sizes, counts = _usable(sizes)
    cut_at_pack_ends = split_across_pack or (strategy, overlong) == ("sequential", "split")
    if sizes.max() > limit and not (cut_at_pack_ends and overlong == "error"):
        documents, sizes, more = _apply_policy(documents, sizes, limit, overlong)
        counts |= more

    # More room than there are tokens changes nothing, and a bound keeps the arithmetic small.
    room = min(limit, int(sizes.sum()))
    if cut_at_pack_ends:
        spans, pack_offsets = end_to_end(documents, sizes, room)
    elif strategy == "sequential":
        spans, pack_offsets = next_fit(documents, sizes, room)
    else:
        spans, pack_offsets = best_fit(documents, sizes, room, seed=seed, epoch=epoch)

    if max_packs is not None and max_packs < len(pack_offsets) - 1:
        pack_offsets = pack_offsets[: max_packs + 1]
        spans = Spans(*(array[: pack_offsets[-1]].copy() for array in spans))
        counts["num_unused"] = len(documents) - int(np.count_nonzero(np.bincount(spans.documents)))
        counts["num_unused_tokens"] = int(sizes.sum() - spans.lengths.sum())
    counts["num_cuts"] = int(np.count_nonzero(spans.starts))
    if counts["num_cuts"]:
        counts["num_split"] = int(np.count_nonzero(np.bincount(spans.documents) > 1))

    for array in (*spans, pack_offsets):
        array.setflags(write=False)
    return PackPlan(
        spans.documents,
        spans.starts,
        spans.lengths,
        pack_offsets,
        max_seq_len=limit,
        strategy=strategy,
        **counts,
    )


def _usable(sizes: _Ints) -> tuple[_Ints, _Ints, dict[str, int]]:
    """Indices and sizes of the documents that hold a token, and how many do and do not."""
    documents = np.flatnonzero(sizes)
    if not len(documents):
        raise ValueError(
            f"no non-empty samples: {len(sizes):,} lengths were given and none is above 0; check "
            "the data source and its filters"
        )
    counts = {"num_documents": len(documents), "num_empty": len(sizes) - len(documents)}
    return documents, sizes[documents] if counts["num_empty"] else sizes, counts


def _apply_policy(
    documents: _Ints, sizes: _Ints, limit: int, overlong: str
) -> tuple[_Ints, _Ints, dict[str, int]]:
    """What the policy leaves of the documents, some of which are too long, and what it took."""
    is_overlong = sizes > limit
    number = int(np.count_nonzero(is_overlong))
    if overlong == "error":
        first = int(is_overlong.argmax())
        raise ValueError(
            f"sample {documents[first]} is too long for a pack ({sizes[first]} > {limit} tokens), "
            f"one of {number:,} overlong among {len(sizes):,} samples; raise max_seq_len, or set "
            "overlong to 'drop', 'truncate' or 'split'"
        )
    if overlong == "drop":
        if number == len(sizes):
            raise ValueError(
                f"no non-empty samples are left: all {number:,} are longer than "
                f"max_seq_len={limit} and overlong='drop'; raise max_seq_len, or set overlong to "
                "'truncate' or 'split'"
            )
        counts = {"num_dropped": number, "num_dropped_tokens": int(sizes[is_overlong].sum())}
        return documents[~is_overlong], sizes[~is_overlong], counts
    if overlong == "truncate":
        lost = int((sizes[is_overlong] - limit).sum())
        counts = {"num_truncated": number, "num_truncated_tokens": lost}
        return documents, np.minimum(sizes, limit), counts
    return documents, sizes, {}


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
