"""The fast rotation equals torchtune's modules, forward and backward."""

import pytest
import torch
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.phi3 import Phi3RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings

from torchtune_packing.rotary import rotate_q_and_k

MODULES = [RotaryPositionalEmbeddings, Llama3ScaledRoPE, Phi3RotaryPositionalEmbeddings]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", MODULES)
def test_rotation_equals_torchtune(module, dtype, table_dtype) -> None:
    """At most one rounding of float32 apart, in which torchtune computes."""
    rope = module(16, max_seq_len=32).to(table_dtype)
    input_pos = torch.tensor([[0, 1, 2, 3, 0, 1, 31], [5, 6, 7, 8, 9, 10, 11]])
    q = torch.randn(2, 7, 4, 16, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 7, 2, 16, dtype=dtype, requires_grad=True)
    grads = torch.randn_like(q), torch.randn_like(k)

    rotated = rotate_q_and_k(rope, q, k, input_pos)
    ours = (*rotated, *torch.autograd.grad(rotated, (q, k), grads))
    rotated = rope(q, input_pos=input_pos), rope(k, input_pos=input_pos)
    theirs = (*rotated, *torch.autograd.grad(rotated, (q, k), grads))

    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        one_rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(mine, reference, rtol=one_rounding, atol=one_rounding)


def test_positions_count_up_when_none_are_given() -> None:
    rope = RotaryPositionalEmbeddings(8, max_seq_len=32)
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 1, 8)
    counted = rotate_q_and_k(rope, q, k, torch.arange(6)[None])
    for given, default in zip(counted, rotate_q_and_k(rope, q, k, None), strict=True):
        assert torch.equal(given, default)


def test_a_position_behind_the_table_is_an_error() -> None:
    rope = RotaryPositionalEmbeddings(8, max_seq_len=4)
    with pytest.raises(IndexError, match="out of bounds"):
        rotate_q_and_k(rope, torch.randn(1, 1, 2, 8), torch.randn(1, 1, 1, 8), torch.tensor([[4]]))
