"""BlockMasks with a sliding window, by ranges, against the library's evaluation of all pairs."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

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
