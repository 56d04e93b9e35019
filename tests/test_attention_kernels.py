"""Each kernel against dense attention in float64, on random packs.

The CUDA adapters run on stand-ins: pure-torch functions with the signature and the semantics of
the real ones, written from their documentation.
"""

import inspect
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from tests.tiny_models import one_thread
from torchtune_packing.attention_choice import kernels
from torchtune_packing.attention_cpu import _document_attention, document_attention_cpu
from torchtune_packing.attention_kernels import (
    CpuVarlen,
    FlashAttn,
    Flex,
    TorchVarlen,
    WindowedBlockMasks,
    allowed_pairs,
    dense_attention,
)
from torchtune_packing.layout import DocumentLayout
from torchtune_packing.masks import block_causal_block_mask

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def flex_backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch's unfused FlexAttention differentiate on the CPU; only a check forbids it."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)


# Stand-ins for functions that need a GPU


def _one_by_one(q, k, v, cu_q, cu_k, causal, window=(-1, -1)) -> torch.Tensor:
    """Attention per sequence of ``[T, h, dh]`` tensors; empty sequences are allowed."""
    assert cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k)
    assert q.dim() == k.dim() == v.dim() == 3 and q.shape[0] == int(cu_q[-1])
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for start, stop in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        one_q, one_k, one_v = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        one_k, one_v = one_k.repeat_interleave(group, 0), one_v.repeat_interleave(group, 0)
        scores = one_q @ one_k.transpose(1, 2) / q.shape[2] ** 0.5
        gap = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = torch.ones_like(gap, dtype=torch.bool)
        if causal or window[1] >= 0:
            seen &= gap >= -max(window[1], 0)
        if window[0] >= 0:
            seen &= gap <= window[0]
        scores = scores.masked_fill(~seen, float("-inf"))
        out[start:stop] = (torch.softmax(scores, -1) @ one_v).transpose(0, 1)
    return out


def varlen_attn_2_10(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
):
    assert query.shape[1] == key.shape[1], "torch 2.10 documents no grouped heads"
    assert max_q >= int((cu_seq_q[1:] - cu_seq_q[:-1]).max())
    return _one_by_one(query, key, value, cu_seq_q, cu_seq_k, is_causal)


def varlen_attn_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    assert max_q >= int((cu_seq_q[1:] - cu_seq_q[:-1]).max())
    return _one_by_one(query, key, value, cu_seq_q, cu_seq_k, False, window_size)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert dropout_p == 0.0 and max_seqlen_q >= int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
    return _one_by_one(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window_size)


KERNELS: dict[str, Any] = {
    "cpu": CpuVarlen(),
    "varlen 2.10": TorchVarlen(varlen_attn_2_10),
    "varlen 2.11": TorchVarlen(varlen_attn_2_11),
    "flash_attn": FlashAttn(flash_attn_varlen_func),
    "flex": Flex(compiled=False),
}


def make_mask(name: str, seq_lens: torch.Tensor, s: int) -> Any:
    if name == "flex":
        return block_causal_block_mask(seq_lens, s)
    return DocumentLayout.from_seq_lens(seq_lens, s, num_slots=seq_lens.shape[1] + 3)


def random_case(seed: int, *, head_dim: int = 8) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    """A random pack with its s and q, k, v in float64; lengths of one token are common."""
    chance = random.Random(seed)
    s, b, group = chance.choice([17, 128, 200]), chance.randint(1, 3), chance.choice([1, 3])
    rows = []
    for _ in range(b):
        row, left = [], s
        while left:
            row.append(min(left, chance.choice([1, 1, 2, 9, 33, 150])))
            left -= row[-1]
        rows.append(row)
    d = max(map(len, rows))
    seq_lens = torch.tensor([row + [0] * (d - len(row)) for row in rows], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, s, heads, head_dim) for heads in (2 * group, 2, 2)]
    return (
        seq_lens,
        s,
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes],
    )


def output_and_grads(run, inputs, *args) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = run(types.SimpleNamespace(), *inputs, *args)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_dense_attention(name: str, flex_backward_on_cpu: None) -> None:
    for seed in range(3 if name == "flex" else 8):
        seq_lens, s, inputs = random_case(seed)
        mask = make_mask(name, seq_lens, s)
        allowed = allowed_pairs(make_mask("cpu", seq_lens, s), object(), CPU)
        ours = output_and_grads(KERNELS[name], inputs, mask)
        exact = output_and_grads(dense_attention, inputs, allowed)
        for mine, reference in zip(ours, exact, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("head_dim", [8, 24, 72, 96, 192])
def test_B39_any_head_dim_on_the_cpu(head_dim: int) -> None:
    seq_lens, s, inputs = random_case(3, head_dim=head_dim)
    layout = make_mask("cpu", seq_lens, s)
    ours = output_and_grads(CpuVarlen(), inputs, layout)
    exact = output_and_grads(dense_attention, inputs, allowed_pairs(layout, object(), CPU))
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_on_the_cpu_is_no_worse_than_torchs_own(dtype: torch.dtype) -> None:
    """The limit is the error of torch's SDPA on the same inputs, dense mask, same dtype."""
    seq_lens, s, inputs = random_case(4, head_dim=64)
    inputs = [x.to(dtype) for x in inputs]
    layout = make_mask("cpu", seq_lens, s)
    allowed = allowed_pairs(layout, object(), CPU)
    exact = output_and_grads(dense_attention, [x.double() for x in inputs], allowed)
    ours = output_and_grads(CpuVarlen(), inputs, layout)
    theirs = output_and_grads(dense_attention, inputs, allowed)
    for mine, other, reference in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == dtype
        error, limit = ((x.double() - reference).norm() for x in (mine, other))
        assert error <= 1.1 * limit


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", KERNELS)
def test_B10_a_poisoned_document_changes_no_other(name: str, flex_backward_on_cpu: None) -> None:
    """Huge values in document 1: bit for bit the same outputs and gradients elsewhere."""
    seq_lens = torch.tensor([[5, 7, 9, 3], [24, 0, 0, 0]], dtype=torch.int32)
    mask = make_mask(name, seq_lens, 24)
    inputs = [torch.randn(2, 24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        x[0, 5:12] = 1e30
    clean = output_and_grads(KERNELS[name], inputs, mask)
    dirty = output_and_grads(KERNELS[name], poisoned, mask)
    for before, after in zip(clean, dirty, strict=True):
        for elsewhere in ((0, slice(0, 5)), (0, slice(12, 24)), (1, slice(0, 24))):
            assert torch.equal(before[elsewhere], after[elsewhere])


@pytest.mark.parametrize("name", ["cpu", "flash_attn"])
def test_B34_pads_are_finite_and_apart(name: str) -> None:
    """3 tokens in a row of 8: pads see pads, or cost nothing and get zeros."""
    seq_lens = torch.tensor([[3, 5]], dtype=torch.int32)
    inputs = [torch.randn(1, 8, 2, 4, dtype=torch.float64) for _ in range(3)]
    allowed = allowed_pairs(make_mask("cpu", seq_lens, 8), object(), CPU)
    assert allowed.any(-1).all() and not allowed[0, :3, 3:].any() and not allowed[0, 3:, :3].any()
    for x in output_and_grads(KERNELS[name], inputs, make_mask(name, seq_lens, 8)):
        assert x.isfinite().all()


def test_known_padding_is_not_computed_on_the_cpu() -> None:
    """NaN in the padding tail reaches nothing: neither outputs nor gradients touch it."""
    seq_lens = torch.tensor([[3, 5], [8, 0]], dtype=torch.int32)
    layout = DocumentLayout.from_seq_lens(seq_lens, 8, real_lengths=torch.tensor([3, 8]))
    inputs = [torch.randn(2, 8, 2, 4) for _ in range(3)]
    for x in inputs:
        x[0, 3:] = float("nan")
    out, *grads = output_and_grads(CpuVarlen(), inputs, layout)
    for x in (out, *grads):
        assert x.isfinite().all() and (x[0, 3:] == 0).all() and (x[0, :3] != 0).any()


def test_the_cpu_operator_obeys_torchs_rules_for_operators() -> None:
    """Schema, shapes under tracing, and registration of the backward, as ``opcheck`` sees them."""
    q, k, v = (torch.randn(1, 6, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    spans = DocumentLayout.from_seq_lens(torch.tensor([[4, 2]]), 6).spans
    torch.library.opcheck(_document_attention, (q, k, v, spans))


def test_inputs_need_not_be_contiguous() -> None:
    seq_lens = torch.tensor([[4, 3], [7, 0]], dtype=torch.int32)
    layout = make_mask("cpu", seq_lens, 7)
    inputs = [torch.randn(2, heads, 7, 8).transpose(1, 2) for heads in (4, 2, 2)]
    expected = document_attention_cpu(*(x.contiguous() for x in inputs), layout.spans)
    assert torch.equal(document_attention_cpu(*inputs, layout.spans), expected)


# The adapters, and where they come from


def test_the_stand_in_of_2_11_has_the_installed_signature() -> None:
    """So that the adapter's tests speak of the function that users have."""
    from torch.nn.attention.varlen import varlen_attn

    real, stand_in = (inspect.signature(f).parameters for f in (varlen_attn, varlen_attn_2_11))
    assert [(p.name, p.kind, p.default) for p in real.values()][:7] == [
        (p.name, p.kind, p.default) for p in stand_in.values()
    ][:7]
    assert real["window_size"].default == (-1, -1)


def test_a_varlen_attn_that_cannot_be_causal_is_refused() -> None:
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
        return query

    with pytest.raises(ValueError, match="neither window_size nor is_causal"):
        TorchVarlen(varlen_attn)


def test_kernels_come_from_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    (kernel,) = kernels("flash_attn", torch.device("cuda"))
    assert isinstance(kernel, FlashAttn) and kernel.function is flash_attn_varlen_func
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn_2_10)
    (kernel,) = kernels("varlen", torch.device("cuda"))
    assert isinstance(kernel, TorchVarlen) and kernel.causal == {"is_causal": True}
    assert [type(kernel) for kernel in kernels("flex", torch.device("cuda"))] == [Flex, Flex]
    assert kernels("sdpa", torch.device("cuda")) == []


# FlexAttention


def test_B43_compiled_flex_forward_equals_dense_attention_in_float32() -> None:
    """Lengths of one token, s no multiple of the block, grouped heads, soft cap and window.

    The limit is the error that dense float32 attention itself has against float64.
    """
    s, rows = 200, [[1, 1, 50, 148], [200, 0, 0, 0]]
    seq_lens = torch.tensor(rows, dtype=torch.int32)
    layer = types.SimpleNamespace(softcapping=5.0, sliding_window_size=30, scaling=0.3)
    mask = WindowedBlockMasks({30: block_causal_block_mask(seq_lens, s, window=30)})
    allowed = allowed_pairs(make_mask("cpu", seq_lens, s), layer, CPU)
    assert torch.equal(allowed_pairs(mask, layer, CPU), allowed)
    q, k, v = (torch.randn(2, s, heads, 24) for heads in (4, 2, 2))
    with torch.no_grad():
        ours = Flex()(layer, q, k, v, mask)
        single = dense_attention(layer, q, k, v, allowed)
        # Its softmax is float32 on purpose, so the exact value is spelled out here.
        wide_q, wide_k, wide_v = (x.double().transpose(1, 2) for x in (q, k, v))
        wide_k, wide_v = wide_k.repeat_interleave(2, 1), wide_v.repeat_interleave(2, 1)
        scores = 5 * torch.tanh(wide_q @ wide_k.transpose(2, 3) * 0.3 / 5)
        scores = scores.masked_fill(~allowed[:, None], float("-inf"))
        exact = (torch.softmax(scores, -1) @ wide_v).transpose(1, 2)
    assert (ours - exact).abs().max() <= 4 * (single - exact).abs().max()
