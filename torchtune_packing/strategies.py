"""The ways to lay documents into packs: whole in data order, cut at pack ends, or best fit.

Each takes the documents to be packed, as indices in ascending order and sizes, and gives their
spans pack by pack, and the pack offsets. All work in numpy over whole arrays; only next fit takes a
step in Python for each pack.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtune_packing.best_fit import best_fit_bins
from torchtune_packing.random_order import Stream, random_bits, random_order, sort_in_groups

__all__ = ["Spans", "best_fit", "end_to_end", "next_fit"]

_Ints = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Spans in the order of packs: the first three fields of a plan, int64 ``[m]`` each."""

    documents: _Ints
    starts: _Ints
    lengths: _Ints


def next_fit(documents: _Ints, sizes: _Ints, limit: int) -> tuple[Spans, _Ints]:
    """Fills packs in data order, each until the next document no longer fits.

    Args:
        documents: indices, ascending.
        sizes: their tokens, from 1 to ``limit``.
        limit: most tokens in a pack.
    """
    ends = np.cumsum(sizes)
    # For each document, the first one that no longer fits into a pack that begins with it.
    following = np.searchsorted(ends, ends - sizes + limit, side="right")
    offsets = [0]
    while offsets[-1] < len(sizes):
        offsets.append(following.item(offsets[-1]))
    # A copy, because a plan makes its arrays read-only and the sizes may be the caller's own.
    return _whole(documents, sizes.copy()), np.array(offsets)


def end_to_end(documents: _Ints, sizes: _Ints, limit: int) -> tuple[Spans, _Ints]:
    """Lays documents end to end in data order and cuts them where a pack ends.

    Args:
        documents: indices, ascending.
        sizes: their tokens, at least 1.
        limit: tokens in every pack but the last.
    """
    ends = np.cumsum(sizes)
    begins = ends - sizes
    first_pack = begins // limit
    owner, piece = _numbered((ends - 1) // limit - first_pack + 1)
    pack = first_pack[owner] + piece
    begins, ends = begins[owner], ends[owner]
    span_begins = np.maximum(begins, pack * limit)
    lengths = np.minimum(ends, (pack + 1) * limit) - span_begins
    return Spans(documents[owner], span_begins - begins, lengths), _offsets(pack)


def best_fit(
    documents: _Ints, sizes: _Ints, limit: int, *, seed: int, epoch: int
) -> tuple[Spans, _Ints]:
    """Packs by best-fit decreasing; longer documents are cut into pieces of ``limit`` and a rest.

    Which of the documents of equal length goes where, the order of the packs and the order within
    each are drawn by seed and epoch; the lengths that meet in a pack do not depend on them.

    Args:
        documents: indices, ascending.
        sizes: their tokens, at least 1.
        limit: most tokens in a pack.
        seed: seed of the run.
        epoch: number of the epoch.
    """
    all_whole = int(sizes.max()) <= limit
    pieces = _whole(documents, sizes) if all_whole else _pieces(documents, sizes, limit)
    n, longest = len(pieces.lengths), int(pieces.lengths.max())

    def bits(stream: Stream) -> npt.NDArray[np.uint64]:
        return random_bits(n, seed=seed, epoch=epoch, stream=stream)

    # Longest first, and those of equal length in an order that is new in every epoch.
    below, order = sort_in_groups(longest - pieces.lengths, np.arange(n), bits(Stream.NEIGHBOURS))
    counts = np.bincount(below)
    del below
    present = np.flatnonzero(counts)
    bins, num_packs = best_fit_bins((longest - present).tolist(), counts[present].tolist(), limit)
    packs = random_order(num_packs, seed=seed, epoch=epoch, stream=Stream.PACK_ORDER)[bins]
    del bins
    packs, order = sort_in_groups(packs, order, bits(Stream.ORDER_IN_PACK))
    # Two or four bytes a length are gathered faster than eight.
    lengths = pieces.lengths.astype(np.min_scalar_type(longest))[order].astype(np.int64)
    if all_whole and documents[-1] == n - 1:  # none left out, none cut: pieces are documents
        return Spans(order, pieces.starts, lengths), _offsets(packs)
    return Spans(pieces.documents[order], pieces.starts[order], lengths), _offsets(packs)


def _whole(documents: _Ints, sizes: _Ints) -> Spans:
    """One span for each document."""
    return Spans(documents, np.zeros(len(sizes), np.int64), sizes)


def _pieces(documents: _Ints, sizes: _Ints, limit: int) -> Spans:
    """Documents longer than ``limit`` cut into pieces of ``limit`` and a rest, in data order."""
    owner, piece = _numbered(-(-sizes // limit))
    starts = piece * limit
    return Spans(documents[owner], starts, np.minimum(sizes[owner] - starts, limit))


def _numbered(counts: _Ints) -> tuple[_Ints, _Ints]:
    """``counts[i]`` pieces of each owner i: the owner of each, and its number within the owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _offsets(packs: _Ints) -> _Ints:
    """Where each pack begins, given the pack of each span in ascending order."""
    return np.concatenate(([0], np.cumsum(np.bincount(packs))))
