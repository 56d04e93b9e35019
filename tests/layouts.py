"""Random document layouts, and slow but obvious versions of what the masks compute from them."""

import random
from collections.abc import Sequence

import torch


def random_rows(rng: random.Random, s: int, b: int) -> list[list[int]]:
    """b rows of document lengths that sum to s: single tokens, short, long, and exact blocks."""
    rows = []
    for _ in range(b):
        longest = rng.choice([1, 8, 64, 300, 1000])
        row: list[int] = []
        left = s
        while left:
            length = min(left, rng.choice([1, 64, 128, rng.randint(1, longest)]))
            row.append(length)
            left -= length
        rows.append(row)
    return rows


def zero_filled(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The rows as int32 ``[b, d]``, zero-filled on the right."""
    d = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (d - len(row))] for row in rows], dtype=torch.int32)


def slow_ids(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Document ids, one position at a time."""
    return [[i for i, length in enumerate(row) for _ in range(length)] for row in rows]


def slow_mask(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The mask as a sentence: same document, and not later. bool ``[b, s, s]``."""
    ids = torch.tensor(slow_ids(rows))
    position = torch.arange(ids.shape[1])
    return (ids[:, :, None] == ids[:, None, :]) & (position[:, None] >= position[None, :])
