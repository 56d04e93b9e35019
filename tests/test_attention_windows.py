"""Sliding windows: BlockMasks by ranges, and the dense form, against evaluations of all pairs."""

import random
import types
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torchtune_packing.attention_kernels import WindowedBlockMasks, allowed_pairs
from torchtune_packing.layout import DocumentLayout
from torchtune_packing.masks import block_causal_block_mask, document_starts


def random_seq_lens(chance: random.Random, b: int, s: int) -> torch.Tensor:
    rows = []
    for _ in range(b):
        lengths, left = [], s
        while left:
            length = chance.randint(1, min(left, chance.choice([3, 40, 200])))
            lengths.append(length)
            left -= length
        rows.append(lengths)
    d = max(map(len, rows))
    return torch.tensor([row + [0] * (d - len(row)) for row in rows], dtype=torch.int32)


def blocks(mask: BlockMask, kind: str) -> list[list[int]]:
    """The block numbers that count, per row of blocks."""
    counts = getattr(mask, f"{kind}_num_blocks").flatten().tolist()
    indices = getattr(mask, f"{kind}_indices").flatten(0, -2).tolist()
    return [sorted(row[:n]) for row, n in zip(indices, counts, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_windowed_block_mask_equals_create_block_mask(seed: int) -> None:
    chance = random.Random(seed)
    b, s, size = chance.randint(1, 3), chance.randint(1, 300), chance.choice([8, 16, 64])
    seq_lens = random_seq_lens(chance, b, s)
    starts = document_starts(seq_lens, s)
    for window in (1, 2, 7, 8, 16, 17, 64, 400):

        def seen(b, h, q, k, window=window):
            return (starts[b, q] <= k) & (k <= q) & (q - k < window)

        expected = create_block_mask(seen, b, None, s, s, device="cpu", BLOCK_SIZE=size)
        ours = block_causal_block_mask(seq_lens, s, block_size=size, window=window)
        for kind in ("kv", "full_kv", "q", "full_q"):
            assert blocks(ours, kind) == blocks(expected, kind), (kind, window)
        assert torch.equal(ours.to_dense(), expected.to_dense())


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        block_causal_block_mask(torch.tensor([[4]]), 4, window=0)


def pairs_by_hand(rows: list[list[int]], window: int | None) -> torch.Tensor:
    """Document by document, query by query: the last ``window`` positions, itself included."""
    s = sum(rows[0])
    seen = torch.zeros(len(rows), s, s, dtype=torch.bool)
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            for query in range(length):
                first = 0 if window is None else max(0, query - window + 1)
                for key in range(first, query + 1):
                    seen[row, start + query, start + key] = True
            start += length
    return seen


def masks_of(rows: list[list[int]], window: int | None) -> dict[str, Any]:
    """The kinds of masks that ``allowed_pairs`` takes, each for a layer with this window."""
    s, d = sum(rows[0]), max(map(len, rows))
    seq_lens = torch.tensor([row + [0] * (d - len(row)) for row in rows], dtype=torch.int32)
    with_window = block_causal_block_mask(seq_lens, s, block_size=4, window=window)
    return {
        "layout": DocumentLayout.from_seq_lens(seq_lens, s),
        "block mask": block_causal_block_mask(seq_lens, s, block_size=4),
        "block masks by window": WindowedBlockMasks({window: with_window}),
    }


@pytest.mark.parametrize("kind", ["layout", "block mask", "block masks by window"])
def test_dense_form_of_every_mask_and_window_equals_pairs_by_hand(kind: str) -> None:
    """What replaces a failed kernel, and what a trial is judged by; windows up to the whole row."""
    rows = [[1, 6, 4, 2], [9, 1, 1, 2], [13]]
    for window in [None, *range(1, 15)]:
        layer = types.SimpleNamespace(sliding_window_size=window)
        allowed = allowed_pairs(masks_of(rows, window)[kind], layer, torch.device("cpu"))
        assert torch.equal(allowed, pairs_by_hand(rows, window)), window


def test_mask_mod_honours_the_window_by_itself() -> None:
    """The kernels evaluate it in partial blocks, and nothing cuts off what it lets through."""
    rows = [[1, 6, 4, 2], [9, 1, 1, 2], [13]]
    no_window = types.SimpleNamespace()
    for window in range(1, 15):
        mask = masks_of(rows, window)["block masks by window"].by_window[window]
        allowed = allowed_pairs(mask, no_window, torch.device("cpu"))
        assert torch.equal(allowed, pairs_by_hand(rows, window)), window
