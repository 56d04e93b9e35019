"""Document ids, starts, the bool mask and cu_seqlens, against loops, by hand, and torchtune."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtune.modules.attention_utils import (
    _get_document_ids_from_seq_lens,
    create_block_causal_mask,
)

from tests.layouts import random_rows, slow_ids, slow_mask, zero_filled
from torchtune_packing import masks
from torchtune_packing.masks import (
    block_causal_block_mask,
    block_causal_mask,
    cu_seqlens,
    document_ids,
    document_starts,
)

INT_DTYPES = [torch.int32, torch.int64, torch.int16]


def test_worked_example() -> None:
    seq_lens = torch.tensor([[3, 2, 3], [1, 7, 0]])
    assert document_ids(seq_lens, 8).tolist() == [
        [0, 0, 0, 1, 1, 2, 2, 2],
        [0, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert document_starts(seq_lens, 8).tolist() == [
        [0, 0, 0, 3, 3, 5, 5, 5],
        [0, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert block_causal_mask(torch.tensor([[2, 1]]), 3).int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    ]


@pytest.mark.parametrize("dtype", INT_DTYPES)
def test_results_are_int32_or_bool_for_any_int_input(dtype: torch.dtype) -> None:
    seq_lens = torch.tensor([[2, 3]], dtype=dtype)
    assert document_ids(seq_lens, 5).dtype == torch.int32
    assert document_starts(seq_lens, 5).dtype == torch.int32
    assert block_causal_mask(seq_lens, 5).dtype == torch.bool
    assert cu_seqlens(seq_lens)[0].dtype == torch.int32


def test_equal_to_loops_over_documents_on_random_rows() -> None:
    rng = random.Random(0)
    for _ in range(60):
        s = rng.randint(1, 120)
        rows = random_rows(rng, s, rng.randint(1, 4))
        seq_lens = zero_filled(rows)
        assert document_ids(seq_lens, s).tolist() == slow_ids(rows)
        assert torch.equal(block_causal_mask(seq_lens, s), slow_mask(rows))
        starts = [[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in rows]
        assert document_starts(seq_lens, s).tolist() == starts


def test_equal_to_torchtune_on_random_rows() -> None:
    rng = random.Random(1)
    for _ in range(20):
        s = rng.randint(1, 200)
        rows = random_rows(rng, s, rng.randint(1, 3))
        seq_lens = zero_filled(rows)
        lists = [torch.tensor(row) for row in rows]
        assert torch.equal(document_ids(seq_lens, s).long(), _get_document_ids_from_seq_lens(lists))
        assert torch.equal(block_causal_mask(seq_lens, s), create_block_causal_mask(lists))


def test_a_zero_length_is_no_document_wherever_it_stands() -> None:
    seq_lens = torch.tensor([[0, 2, 0, 0, 3, 0]])
    assert document_ids(seq_lens, 5).tolist() == [[1, 1, 4, 4, 4]]
    assert document_starts(seq_lens, 5).tolist() == [[0, 0, 2, 2, 2]]
    assert torch.equal(block_causal_mask(seq_lens, 5), slow_mask([[2, 3]]))
    boundaries, longest = cu_seqlens(seq_lens)
    assert (boundaries.tolist(), longest) == ([0, 2, 5], 3)


def test_B34_rows_that_do_not_sum_to_s_leave_no_position_blind() -> None:
    short, none, long = [[3, 0]], [[0, 0]], [[3, 9]]
    assert torch.equal(block_causal_mask(torch.tensor(short), 8), slow_mask([[3, 5]]))
    assert document_ids(torch.tensor(short), 8).tolist() == [[0, 0, 0, 2, 2, 2, 2, 2]]
    assert torch.equal(block_causal_mask(torch.tensor(none), 8), slow_mask([[8]]))
    assert torch.equal(block_causal_mask(torch.tensor(long), 8), slow_mask([[3, 5]]))


def test_B34_pad_rows_see_themselves_and_gradients_are_finite() -> None:
    seq_lens = torch.tensor([[3, 5]], dtype=torch.int32)
    mask = block_causal_mask(seq_lens, 8)
    assert mask.any(-1).all()
    assert not mask[0, :3, 3:].any() and not mask[0, 3:, :3].any()
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    for backend in ("sdpa", "eager"):
        if backend == "sdpa":
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        else:
            scores = (q @ k.mT).masked_fill(~mask[:, None], float("-inf"))
            out = scores.softmax(-1) @ v
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_B10_second_copy_of_a_document_sees_nothing_of_the_first() -> None:
    mask = block_causal_mask(torch.tensor([[20, 20]]), 40)
    assert not mask[0, 20:, :20].any()
    assert torch.equal(mask[0, 20:, 20:], mask[0, :20, :20])


def test_B41_bool_mask_states_its_size_and_refuses_above_the_limit() -> None:
    seq_lens = torch.full((4, 1), 32768, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"4,294,967,296 bytes.*2,147,483,648.*flex.*varlen"):
        block_causal_mask(seq_lens, 32768)
    small = torch.tensor([[10]])
    with pytest.raises(ValueError, match="limit of 99"):
        block_causal_mask(small, 10, max_bytes=99)
    assert block_causal_mask(small, 10, max_bytes=100).numel() == 100
    with FakeTensorMode():
        huge = block_causal_mask(torch.zeros(4, 1, dtype=torch.int32), 32768, max_bytes=None)
    assert huge.numel() == 4 * 32768**2


def test_cu_seqlens_lays_rows_end_to_end_and_leaves_zeros_out() -> None:
    boundaries, longest = cu_seqlens(torch.tensor([[3, 2, 0], [1, 1, 3]]))
    assert boundaries.tolist() == [0, 3, 5, 6, 7, 10]
    assert longest == 3 and isinstance(longest, int)


def test_cu_seqlens_refuses_a_batch_without_documents() -> None:
    with pytest.raises(ValueError, match="holds no document"):
        cu_seqlens(torch.zeros(2, 3, dtype=torch.int32))


@pytest.mark.parametrize(
    "function", [document_ids, document_starts, block_causal_mask, block_causal_block_mask]
)
def test_bad_input_is_named(function) -> None:
    with pytest.raises(ValueError, match=r"seq_lens is torch.int64 \[2\]"):
        function(torch.tensor([1, 2]), 3)
    with pytest.raises(ValueError, match=r"seq_lens is torch.float32 \[1, 1\]"):
        function(torch.tensor([[3.0]]), 3)
    with pytest.raises(ValueError, match="seq_lens is a list"):
        function([[1, 2]], 3)
    with pytest.raises(ValueError, match="s is 0"):
        function(torch.tensor([[1, 2]]), 0)


@pytest.mark.parametrize(
    "function", [document_ids, document_starts, block_causal_mask, block_causal_block_mask]
)
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_shapes_follow_from_python_numbers_alone(function, kind: str) -> None:
    # Reading a value of a fake or meta tensor raises, so a host sync or a shape taken from the data
    # would fail here; so would a tensor made on another device than that of seq_lens.
    if kind == "meta":
        result = function(torch.empty(2, 7, dtype=torch.int32, device="meta"), 300)
    else:
        with FakeTensorMode():
            result = function(torch.empty(2, 7, dtype=torch.int32), 300)
    tensors = [result] if isinstance(result, torch.Tensor) else _tensors_of(result)
    assert {t.device.type for t in tensors} == {"meta" if kind == "meta" else "cpu"}
    assert all(t.shape[0] == 2 for t in tensors)


def _tensors_of(block_mask) -> list[torch.Tensor]:
    tensors = [x for x in block_mask.as_tuple() if isinstance(x, torch.Tensor)]
    assert len(tensors) == 8
    return tensors


@pytest.mark.parametrize("function", [document_ids, document_starts, block_causal_mask])
def test_traces_into_one_graph(function) -> None:
    seq_lens = zero_filled([[3, 20, 7], [29, 1]])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    assert torch.equal(compiled(seq_lens, 30), function(seq_lens, 30))


def test_public_names() -> None:
    assert set(masks.__all__) == {
        "MAX_BOOL_MASK_BYTES",
        "MAX_INDEX_BYTES",
        "block_causal_block_mask",
        "block_causal_mask",
        "choose_block_size",
        "cu_seqlens",
        "document_ids",
        "document_starts",
    }
