"""The CUDA backends against dense attention: kernels, whole models, recompiles, synchronisation."""

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny_models import Batch, tiny
from torchtune_packing.attention import install_attention
from torchtune_packing.attention_choice import kernels, obstacle
from torchtune_packing.attention_kernels import allowed_pairs, dense_attention
from torchtune_packing.attention_layers import PackedLayer
from torchtune_packing.layout import DocumentLayout
from torchtune_packing.masks import block_causal_block_mask

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HEAD_DIMS = (64, 72, 96, 128)
DTYPES = (torch.float32, torch.bfloat16)
#: One-token documents, a long one, an empty slot; 500 is no multiple of 128.
ROWS = [[1, 1, 300, 77, 121], [40, 460, 0, 0, 0]]
S = 500


def layers_of(head_dim: int) -> dict[str, nn.Module]:
    """Attention layers with grouped heads, for what ``obstacle`` and the kernels ask of them."""
    model = tiny("gemma", head_dim=head_dim, num_heads=4, num_kv_heads=2)
    return {"0": model.layers[0].attn}


def skip_unless_possible(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    """Skips what this GPU, dtype or environment cannot do, with the reason users would read."""
    why_not = obstacle(backend, layers_of(head_dim), device=CUDA, dtype=dtype, forward_only=False)
    if why_not is not None:
        pytest.skip(f"{backend}: {why_not}")


def run(kernel: Any, inputs: list[torch.Tensor], mask: Any) -> list[torch.Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = kernel(object(), *inputs, mask)
    weights = torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", ["flex", "varlen", "flash_attn"])
def test_B43_kernels_equal_dense_attention(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    """Outputs and gradients; the limit is twice the error of torch's SDPA in the same dtype.

    In float32 the floor of the limit is 1e-3, since the kernels may use TF32.
    """
    skip_unless_possible(backend, head_dim, dtype)
    seq_lens = torch.tensor(ROWS, dtype=torch.int32)
    layout = DocumentLayout.from_seq_lens(seq_lens, S, device=CUDA, num_slots=32)
    mask = block_causal_block_mask(seq_lens.to(CUDA), S) if backend == "flex" else layout
    allowed = allowed_pairs(layout, object(), CUDA)
    inputs = [torch.randn(2, S, heads, head_dim, device=CUDA, dtype=dtype) for heads in (4, 2, 2)]
    exact = run(dense_attention, [x.double() for x in inputs], allowed)
    dense = run(dense_attention, inputs, allowed)
    ours = run(kernels(backend, CUDA)[0], inputs, mask)
    floor = 1e-3 if dtype == torch.float32 else 1e-2
    for mine, other, reference in zip(ours, dense, exact, strict=True):
        error, limit = ((x.double() - reference).norm() for x in (mine, other))
        assert error <= max(2 * limit, floor * reference.norm())


@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "flash_attn"])
def test_B10_a_poisoned_document_changes_no_other(backend: str) -> None:
    skip_unless_possible(backend, 64, torch.bfloat16)
    seq_lens = torch.tensor(ROWS, dtype=torch.int32)
    layout = DocumentLayout.from_seq_lens(seq_lens, S, device=CUDA, num_slots=32)
    mask: Any = layout
    kernel: Any = dense_attention
    if backend == "sdpa":
        mask = allowed_pairs(layout, object(), CUDA)
    else:
        kernel = kernels(backend, CUDA)[0]
    if backend == "flex":
        mask = block_causal_block_mask(seq_lens.to(CUDA), S)
    shapes = [(2, S, heads, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes]
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        x[0, 2:302] = 1e4
    clean, dirty = run(kernel, inputs, mask), run(kernel, poisoned, mask)
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[0, 302:], after[0, 302:])
        assert torch.equal(before[0, :2], after[0, :2])
        assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "flash_attn"])
def test_a_packed_model_equals_the_documents_alone(family: str, backend: str) -> None:
    """bfloat16 for the kernels that want it, float32 for the others; limits by dtype."""
    dtype = torch.bfloat16 if backend in ("varlen", "flash_attn") else torch.float32
    if family == "gemma2" and backend in ("varlen", "flash_attn"):
        pytest.skip(f"{backend} is refused for gemma2, which tests/test_attention.py checks")
    skip_unless_possible(backend, 64, dtype)
    changes = {"head_dim": 64} if family == "gemma2" else {"embed_dim": 256}
    model = tiny(family, **changes).to(CUDA, dtype)
    batch = Batch([[33, 2, 1, 1], [60], [5, 5, 5, 5, 5, 40]], 70)
    for name in ("tokens", "input_pos", "mask"):
        setattr(batch, name, getattr(batch, name).to(CUDA))
    expected = batch.alone(model)
    attn = install_attention(model, backend, device=CUDA, dtype=dtype)
    assert attn.backend == backend, attn.reason
    packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
    assert set(attn.describe_layers().values()) == {backend}
    loose = dtype == torch.bfloat16
    packed.assert_equals(
        expected,
        logits=1.0 if loose else 1e-2,
        loss=1e-2 if loose else 1e-3,
        grads=0.1 if loose else 1e-2,
    )


@pytest.mark.parametrize("backend", ["flex", "varlen", "flash_attn"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["eager layers", "compiled layers"])
def test_B37_no_recompiles_and_a_flat_peak_after_step_2(backend: str, layerwise: bool) -> None:
    skip_unless_possible(backend, 64, torch.bfloat16)
    torch.compiler.reset()
    model = tiny("llama3", embed_dim=256, max_seq_len=512).to(CUDA, torch.bfloat16)
    attn = install_attention(model, backend, device=CUDA, dtype=torch.bfloat16)
    assert attn.backend == backend, attn.reason
    if layerwise:
        for layer in model.layers:
            layer.compile()
    counters = torch._dynamo.utils.counters
    graphs, peaks = [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without torch.compile.*")
        for step in range(20):
            lengths = [20] * step + [512 - 20 * step]
            batch = Batch([lengths], 512)
            batch.tokens, batch.input_pos = batch.tokens.to(CUDA), batch.input_pos.to(CUDA)
            torch.cuda.reset_peak_memory_stats()
            batch.run(model, attn.prepare(batch.seq_lens, batch.s))
            graphs.append(counters["stats"]["unique_graphs"])
            peaks.append(torch.cuda.max_memory_allocated())
    assert graphs[2:] == [graphs[1]] * 18
    # Documents alone change; a MiB is for the loss, which this test takes document by document.
    assert max(peaks[2:]) <= peaks[1] + 2**20


@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "flash_attn"])
def test_a_step_never_waits_for_the_device(backend: str) -> None:
    """From ``seq_lens`` on the CPU to the backward, under torch's check for synchronisation."""
    skip_unless_possible(backend, 64, torch.bfloat16)
    model = tiny("llama3", embed_dim=256).to(CUDA, torch.bfloat16)
    attn = install_attention(model, backend, device=CUDA, dtype=torch.bfloat16)
    batch = Batch([[33, 2, 1, 1, 33], [70]], 70)
    tokens, input_pos = batch.tokens.to(CUDA), batch.input_pos.to(CUDA)

    def step() -> None:
        mask = attn.prepare(batch.seq_lens, batch.s)
        model(tokens, input_pos=input_pos, mask=mask).sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_auto_takes_the_first_backend_that_this_machine_can_run() -> None:
    model = tiny("llama3", embed_dim=256).to(CUDA, torch.bfloat16)
    attn = install_attention(model, device=CUDA, dtype=torch.bfloat16)
    if importlib.util.find_spec("flash_attn") is None:
        assert "not flash_attn" in attn.reason
    assert attn.backend != "sdpa", attn.reason
    assert all(isinstance(layer.attn, PackedLayer) for layer in model.layers)


def test_B32_a_model_on_the_cpu_stays_there_beside_a_gpu() -> None:
    before = torch.cuda.memory_allocated()
    model = tiny("llama3")
    attn = install_attention(model, device="cpu", dtype=torch.float32)
    assert attn.backend == "varlen"
    batch = Batch([[9, 1, 20]], 36)
    batch.run(model, attn.prepare(batch.seq_lens, batch.s))
    assert torch.cuda.memory_allocated() == before
