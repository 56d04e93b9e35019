"""Best-fit decreasing on a histogram: bins for all items of one size at once.

Best-fit decreasing takes the items from the largest to the smallest and puts each into the
fullest bin that still has room for it, or into a new bin when none has. Seen from one item that is
a search over bins; seen from all ``count`` items of one ``size`` it is a walk over *rooms*. The
bins with the least room that is still enough come first, and such a bin goes on being the best fit
until it has taken ``room // size`` items. So bins of equal room, and items of equal size, move
together:

    size 4, count 3, capacity 10        bins by room                       new bins
                                        10: (all new ones)                 A(4 4) B(4)
    size 3, count 3                     2: A   6: B                        B(4 3 3) C(3)
    size 2, count 2                     2: A   7: C                        A(4 4 2) C(3 2)

Each line is one or a few *moves*: n bins go from one room to a smaller one and take k items each.
The bins of one room wait in a queue, and a move takes them from the front of one queue to the end
of another. Which bins those are is not looked at until all moves are known; then every place in a
queue points to the place that its bin came from, and doubling the steps again and again leads all
places to their bins at once.

Cost: Python work per move, numpy work per item. There is at least one move per distinct size and at
most one per item; with many items per size, about as many as distinct sizes. The number of bins is
that of best-fit decreasing item by item: at most 11/9 of the optimum plus 1 (D. S. Johnson et al.,
"Worst-case performance bounds for simple one-dimensional packing algorithms", 1974).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["best_fit_bins"]


class _Rooms:
    """A set of ints below a limit that finds its smallest member from a given number up.

    Two levels of bit sets, each about as many bits wide as the square root of the limit, so that a
    step costs some tenths of a microsecond at any limit.
    """

    def __init__(self, limit: int) -> None:
        self._shift = (limit.bit_length() + 1) // 2
        self._mask = (1 << self._shift) - 1
        self._words = [0] * ((limit >> self._shift) + 1)
        self._summary = 0

    def add(self, room: int) -> None:
        high = room >> self._shift
        self._words[high] |= 1 << (room & self._mask)
        self._summary |= 1 << high

    def remove(self, room: int) -> None:
        high = room >> self._shift
        self._words[high] &= ~(1 << (room & self._mask))
        if not self._words[high]:
            self._summary &= ~(1 << high)

    def first_from(self, room: int) -> int:
        """The smallest member that is at least ``room``; 0 if there is none."""
        high = room >> self._shift
        word = self._words[high] >> (room & self._mask)
        if word:
            return room + _lowest_bit(word)
        summary = self._summary >> (high + 1)
        if not summary:
            return 0
        high += 1 + _lowest_bit(summary)
        return (high << self._shift) + _lowest_bit(self._words[high])


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


def _moves(sizes: Sequence[int], counts: Sequence[int], capacity: int) -> npt.NDArray[np.int64]:
    """All moves in order: rows of (room, place, bins, items per bin, new room, new place).

    ``place`` counts from the start of the queue of ``room``, over all bins that were ever in it.
    The queue of ``capacity`` holds the new bins, without end.
    """
    rooms = _Rooms(capacity)
    joined: defaultdict[int, int] = defaultdict(int)
    left: defaultdict[int, int] = defaultdict(int)
    moves: list[tuple[int, int, int, int, int, int]] = []
    for size, count in zip(sizes, counts, strict=True):
        while count:
            room = rooms.first_from(size) or capacity
            items = room // size
            if count >= items:
                bins = count // items
                if room != capacity:
                    bins = min(bins, joined[room] - left[room])
            else:
                items, bins = count, 1
            count -= items * bins
            new_room = room - items * size
            moves.append((room, left[room], bins, items, new_room, joined[new_room]))
            left[room] += bins
            if room != capacity and left[room] == joined[room]:
                rooms.remove(room)
            joined[new_room] += bins
            if new_room:
                rooms.add(new_room)
    return np.array(moves, dtype=np.int64)


def best_fit_bins(
    sizes: Sequence[int], counts: Sequence[int], capacity: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Packs items into bins by best-fit decreasing.

    Args:
        sizes: distinct sizes in descending order, each from 1 to ``capacity``.
        counts: number of items of each size, at least 1.
        capacity: room of an empty bin.

    Returns:
        The bin of each item, int64 ``[sum(counts)]``, items in the order of ``sizes``, and the
        number of bins. Bins are numbered as they are opened.
    """
    moves = _moves(sizes, counts, capacity)
    room, place, bins, items, new_room, new_place = moves.T
    is_new = room == capacity
    num_bins = int(bins[is_new].sum())

    # One row of places for all queues: the new bins, then queue after queue.
    queues, queue = np.unique(new_room, return_inverse=True)
    sizes_of_queues = np.bincount(queue, weights=bins).astype(np.int64)
    starts = num_bins + np.cumsum(sizes_of_queues) - sizes_of_queues
    source = place + np.where(
        is_new, 0, starts[np.searchsorted(queues, room).clip(max=len(queues) - 1)]
    )
    target = new_place + starts[queue]

    within = np.arange(bins.sum()) - np.repeat(np.cumsum(bins) - bins, bins)
    sources = np.repeat(source, bins) + within
    origin = np.arange(num_bins + len(within))
    origin[np.repeat(target, bins) + within] = sources
    while True:
        further = origin[origin]
        if np.array_equal(further, origin):
            break
        origin = further
    return np.repeat(origin[sources], np.repeat(items, bins)), num_bins
