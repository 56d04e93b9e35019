"""The BlockMask by arithmetic, against create_block_mask, by hand, and through FlexAttention."""

import os
import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.layouts import random_rows, slow_mask, zero_filled
from torchtune_packing.masks import (
    MAX_INDEX_BYTES,
    block_causal_block_mask,
    block_causal_mask,
    choose_block_size,
)

SIDES = ("kv", "full_kv", "q", "full_q")


def blocks(mask: BlockMask, side: str, row: int = 0) -> list[list[int]]:
    """The block numbers that each row of blocks lists on one side, up to their counts."""
    counts = getattr(mask, f"{side}_num_blocks")[row, 0]
    indices = getattr(mask, f"{side}_indices")[row, 0]
    return [i[:c].tolist() for c, i in zip(counts.tolist(), indices, strict=True)]


def library_mask(dense: torch.Tensor, block_size: int) -> BlockMask:
    """What the library finds by evaluating every pair of a dense mask."""
    b, s, _ = dense.shape

    def mask_mod(b, h, q_idx, kv_idx):
        return dense[b, q_idx, kv_idx]

    return create_block_mask(mask_mod, b, None, s, s, device="cpu", BLOCK_SIZE=block_size)


def assert_same(ours: BlockMask, theirs: BlockMask) -> None:
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.shape == theirs.shape
    for side in SIDES:
        counts = getattr(ours, f"{side}_num_blocks")
        expected_counts = getattr(theirs, f"{side}_num_blocks")
        assert counts.dtype == torch.int32 and torch.equal(counts, expected_counts), side
        indices, expected = getattr(ours, f"{side}_indices"), getattr(theirs, f"{side}_indices")
        assert indices.dtype == torch.int32 and indices.shape == expected.shape
        # The kernels compute offsets from the shape, and may load one index of an empty row.
        assert indices.is_contiguous()
        assert indices.min() >= 0 and indices.max() < indices.shape[-1]
        listed = torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)
        assert torch.equal(indices[listed], expected[listed]), side
    assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_worked_example() -> None:
    # Positions 0-1, 2-3, 4-5, 6-7; documents 0-2, 3-4, 5-7.
    mask = block_causal_block_mask(torch.tensor([[3, 2, 3]]), 8, block_size=2)
    assert blocks(mask, "kv") == [[0], [0, 1], [1, 2], [2, 3]]
    assert blocks(mask, "full_kv") == [[], [], [], []]
    assert blocks(mask, "q") == [[0, 1], [1, 2], [2, 3], [3]]
    assert blocks(mask, "full_q") == [[], [], [], []]


def test_worked_example_with_full_blocks() -> None:
    # One document over all four blocks, and one that starts in the middle of block 0.
    mask = block_causal_block_mask(torch.tensor([[8, 0], [1, 7]]), 8, block_size=2)
    assert blocks(mask, "kv", 0) == [[0], [1], [2], [3]]
    assert blocks(mask, "full_kv", 0) == [[], [0], [0, 1], [0, 1, 2]]
    assert blocks(mask, "full_q", 0) == [[1, 2, 3], [2, 3], [3], []]
    assert blocks(mask, "kv", 1) == [[0], [0, 1], [0, 2], [0, 3]]
    assert blocks(mask, "full_kv", 1) == [[], [], [1], [1, 2]]
    assert blocks(mask, "q", 1) == [[0, 1, 2, 3], [1], [2], [3]]
    assert blocks(mask, "full_q", 1) == [[], [2, 3], [3], []]


def test_an_incomplete_last_block_is_never_full() -> None:
    mask = block_causal_block_mask(torch.tensor([[7]]), 7, block_size=2)
    assert blocks(mask, "full_kv") == [[], [0], [0, 1], []]
    assert blocks(mask, "kv") == [[0], [1], [2], [0, 1, 2, 3]]


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("b", [1, 2, 3, 4])
def test_equals_create_block_mask_on_random_layouts(b: int, block_size: int) -> None:
    rng = random.Random(1000 * b + block_size)
    lengths = [1, 2, block_size - 1, block_size, block_size + 1, 5 * block_size, 999, 1000]
    for s in lengths + [rng.randint(1, 1000) for _ in range(16)]:
        rows = random_rows(rng, s, b)
        dense = slow_mask(rows)
        ours = block_causal_block_mask(zero_filled(rows), s, block_size=block_size)
        assert_same(ours, library_mask(dense, block_size))


def test_mask_mod_is_the_bool_mask() -> None:
    rows = [[3, 100, 1, 46], [150]]
    mask = block_causal_block_mask(zero_filled(rows), 150)
    row, q, k = torch.meshgrid(*(torch.arange(n) for n in (2, 150, 150)), indexing="ij")
    assert torch.equal(mask.mask_mod(row, torch.zeros_like(row), q, k), slow_mask(rows))


class LookUps(TorchDispatchMode):
    """Counts the operations that read a tensor at computed places, and what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("index", "gather", "index_select", "take", "embedding", "_unsafe_index"):
            self.operations += 1
            self.numbers += out.numel()
        return out


@pytest.mark.parametrize("window", [None, 5])
def test_mask_mod_of_a_partial_block_looks_up_one_number_a_pair(window: int | None) -> None:
    """The start of the query's document; comparing two document ids would look up two."""
    mask = block_causal_block_mask(zero_filled([[3, 100, 1, 46], [150]]), 150, window=window)
    row, q, k = (
        x.flatten() for x in torch.meshgrid(*map(torch.arange, (2, 150, 150)), indexing="ij")
    )
    with LookUps() as seen:
        mask.mask_mod(row, torch.zeros_like(row), q, k)
    assert (seen.operations, seen.numbers) == (1, len(row))
    # By ``vmap`` over rows, queries and keys, as the library evaluates it, it is one as well.
    with LookUps() as seen:
        create_mask(mask.mask_mod, 2, 1, 150, 150, device="cpu")
    assert seen.operations == 1


def test_B34_rows_that_do_not_sum_to_s_equal_the_bool_mask() -> None:
    for seq_lens in ([[30, 0, 0]], [[0, 0, 0]], [[30, 500, 9]], [[0, 30, 170]]):
        lens = torch.tensor(seq_lens)
        dense = block_causal_mask(lens, 200)
        assert_same(block_causal_block_mask(lens, 200, block_size=64), library_mask(dense, 64))


def test_B36_batch_of_the_mask_is_the_batch_of_the_lengths() -> None:
    for b in (2, 1):
        mask = block_causal_block_mask(torch.full((b, 1), 300), 300)
        assert mask.shape == (b, 1, 300, 300)


class AllocatedBytes(TorchDispatchMode):
    """Adds up the bytes of everything that is computed: an upper bound of the peak."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


def test_B41_block_mask_never_holds_s_times_s() -> None:
    with AllocatedBytes() as allocated:
        block_causal_block_mask(torch.tensor([[1, 30000, 35535]]), 65536)
    # s * s is 4 GiB; the four index tensors are 4 MiB and are touched a few times.
    assert 4 * 2**20 < allocated.total < 32 * 2**20


def test_block_size_grows_by_itself_at_great_lengths() -> None:
    assert choose_block_size(1, 8192) == 128
    assert choose_block_size(1, 131072) == 128
    assert choose_block_size(8, 131072) == 128  # 16 * 8 * 1024**2 bytes, exactly the limit
    assert choose_block_size(9, 131072) == 256
    assert choose_block_size(1, 1048576) == 512
    assert choose_block_size(1, 1048576, block_size=1024) == 1024
    assert choose_block_size(1, 1048576, max_index_bytes=None) == 128
    assert choose_block_size(2, 100, block_size=64, max_index_bytes=1) == 128  # one block is enough
    with FakeTensorMode():
        lens = torch.empty(1, 4, dtype=torch.int32)
        mask = block_causal_block_mask(lens, 1048576)
        kept = block_causal_block_mask(lens, 1048576, max_index_bytes=None)
    assert mask.BLOCK_SIZE == (512, 512) and kept.BLOCK_SIZE == (128, 128)
    index_bytes = sum(getattr(mask, f"{side}_indices").nbytes for side in SIDES)
    assert index_bytes == 64 * 2**20 <= MAX_INDEX_BYTES


def test_block_size_below_two_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 1"):
        block_causal_block_mask(torch.tensor([[4]]), 4, block_size=1)


@pytest.mark.gpu
def test_same_blocks_on_a_cuda_device_without_waiting_for_it() -> None:
    rows = [[3, 200, 97], [150, 150]]
    seq_lens = zero_filled(rows).cuda()
    block_causal_block_mask(seq_lens, 300)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = block_causal_block_mask(seq_lens, 300)
        dense = block_causal_mask(seq_lens, 300)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert mask.kv_indices.device == dense.device == seq_lens.device
    assert_same(mask.to("cpu"), library_mask(slow_mask(rows), 128))
    assert torch.equal(dense.cpu(), slow_mask(rows))


def test_builds_inside_one_graph() -> None:
    seq_lens = zero_filled([[3, 200, 97], [150, 150]])
    build = torch.compile(
        lambda lens: block_causal_block_mask(lens, 300),
        fullgraph=True,
        backend="aot_eager",
        dynamic=False,
    )
    assert_same(build(seq_lens), library_mask(slow_mask([[3, 200, 97], [150, 150]]), 128))


@pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")),
    reason="torch.compile needs a C++ compiler",
)
def test_flex_attention_compiled_equals_sdpa_and_compiles_once_for_all_layouts() -> None:
    rng = random.Random(0)
    s, d = 300, 40  # not a multiple of the block
    # Its own counter, so that a graph that another test compiled earlier cannot hide a recompile.
    graphs = CompileCounterWithBackend("inductor")
    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False, backend=graphs)
    for documents in (1, 2, 5, 20, 40):
        rows = []
        for _ in range(2):
            cuts = sorted(rng.sample(range(1, s), documents - 1))
            rows.append([b - a for a, b in zip([0, *cuts], [*cuts, s], strict=True)])
        seq_lens = zero_filled([[*row, *[0] * (d - len(row))] for row in rows])
        q, k, v = (torch.randn(2, heads, s, 32) for heads in (4, 2, 2))
        with torch.no_grad():
            mask = block_causal_block_mask(seq_lens, s, block_size=64)
            ours = attend(q, k, v, block_mask=mask, enable_gqa=True)
            expected = F.scaled_dot_product_attention(
                q, k, v, attn_mask=slow_mask(rows)[:, None], enable_gqa=True
            )
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert graphs.frame_count == 1
