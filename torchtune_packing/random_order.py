"""Random orders that every rank, machine and numpy version draws alike.

An order is drawn by sorting: every item gets a 64-bit key whose upper bits are random, whose lowest
bits are the item's own number, and whose topmost bits, if wanted, are a group that goes first. Keys
are distinct, so there is exactly one sorted sequence and any sorting routine finds it.

Only parts of numpy are used whose streams are promised to stay: ``SeedSequence`` and the raw output
of ``PCG64`` (https://numpy.org/doc/stable/reference/random/compatibility.html). The methods of
``Generator``, ``permutation`` among them, come without that promise.

Cost: one sort of n integers, about 0.05 s for 2 million.
"""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Stream", "checked_count", "random_bits", "random_order", "sort_in_groups"]

_KEY_BITS = 64


class Stream(IntEnum):
    """What random bits are drawn for; each use has a stream of its own under one seed and epoch."""

    NEIGHBOURS = 1
    PACK_ORDER = 2
    ORDER_IN_PACK = 3
    EPOCH_ORDER = 4


def checked_count(name: str, value: Any, remedy: str) -> int:
    """The value as a plain int, or one clear sentence when it is no whole number from 0 up.

    Args:
        name: name of the argument.
        value: what was passed.
        remedy: how to set it right; ends the sentence.

    Raises:
        ValueError: the value is None, a bool, no whole number, or negative.
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__") or value < 0:
        raise ValueError(f"{name} is {value!r}, but it must be a whole number from 0 up; {remedy}")
    return operator.index(value)


def random_bits(n: int, *, seed: int, epoch: int, stream: Stream) -> npt.NDArray[np.uint64]:
    """Draws n random 64-bit words, uint64 ``[n]``.

    Args:
        n: number of words.
        seed: seed of the run.
        epoch: number of the epoch.
        stream: what the bits are for.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(int(stream), epoch))
    return np.random.PCG64(sequence).random_raw(n)


def sort_in_groups(
    groups: npt.NDArray[np.int64], items: npt.NDArray[np.int64], bits: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sorts items by group, in random order within each group.

    Args:
        groups: int64 ``[n]``, from 0 up.
        items: int64 ``[n]``, distinct, from 0 up.
        bits: random words, uint64 ``[n]``; overwritten. As many of them count as the largest group
            and the largest item leave free: 64 less their bit lengths.

    Returns:
        The groups and the items in their new order, int64 ``[n]`` each.

    Raises:
        ValueError: groups and items need more than 64 bits together.
    """
    if not len(items):
        return groups, items
    group_bits, item_bits = int(groups.max()).bit_length(), int(items.max()).bit_length()
    if group_bits + item_bits > _KEY_BITS:
        raise ValueError(
            f"{len(items):,} items in groups up to {int(groups.max()):,} need {group_bits} + "
            f"{item_bits} bits, but a sorting key has {_KEY_BITS}; cut the data into parts"
        )
    keys = bits
    group_shift = np.uint64(_KEY_BITS - group_bits)
    if group_bits:
        keys >>= np.uint64(group_bits)
        keys |= groups.view(np.uint64) << group_shift
    item_mask = np.uint64((1 << item_bits) - 1)
    keys &= ~item_mask
    keys |= items.view(np.uint64)
    keys.sort()
    in_order = (keys & item_mask).view(np.int64)
    if not group_bits:
        return np.zeros_like(in_order), in_order
    keys >>= group_shift
    return keys.view(np.int64), in_order


def random_order(n: int, *, seed: int, epoch: int, stream: Stream) -> npt.NDArray[np.int64]:
    """Puts the numbers from 0 to n - 1 into random order, int64 ``[n]``.

    Args:
        n: how many numbers.
        seed: seed of the run.
        epoch: number of the epoch.
        stream: what the order is for.
    """
    bits = random_bits(n, seed=seed, epoch=epoch, stream=stream)
    return sort_in_groups(np.zeros(n, np.int64), np.arange(n), bits)[1]
