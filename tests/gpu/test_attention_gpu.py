"""The CUDA backends against dense attention: kernels, whole models, recompiles, synchronisation."""

import copy
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer

from tests.tiny_models import Batch, Result, all_float64, tiny, tiny_lora
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


def on_cuda(batch: Batch) -> Batch:
    """The batch with what the model reads on the device; ``seq_lens`` stay on the CPU."""
    batch = copy.copy(batch)
    for name in ("tokens", "input_pos", "mask"):
        setattr(batch, name, getattr(batch, name).to(CUDA))
    return batch


def assert_no_worse(ours: Result, dense: Result, exact: Result, *, floor: float = 0.0) -> None:
    """Logits, loss and each gradient: at most twice as far from the exact ones as dense attention.

    Args:
        ours: what is tested.
        dense: torchtune's own code under a dense mask, in the same dtype.
        exact: the documents alone, in float64 on the CPU.
        floor: relative error that is fine however exact dense attention is.
    """

    def values(result: Result) -> dict[str, torch.Tensor]:
        logits = torch.cat([x.flatten() for x in result.documents])
        named = {"logits": logits, "loss": torch.tensor(result.loss), **result.grads}
        return {name: x.cpu().double() for name, x in named.items()}

    found, limits, expected = values(ours), values(dense), values(exact)
    assert found.keys() == limits.keys() == expected.keys()
    for name, reference in expected.items():
        # A single number may be right by chance.
        least = max(floor, 1e-3) if name == "loss" else floor
        error, limit = ((x[name] - reference).norm().item() for x in (found, limits))
        assert error <= max(2 * limit, least * reference.norm().item()), name


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
    exact = run(dense_attention, [x.float() for x in inputs], allowed_pairs(layout, object(), CUDA))
    elsewhere = torch.ones(2, S, dtype=torch.bool, device=CUDA)
    elsewhere[0, 2:302] = False
    assert torch.equal(clean[0][elsewhere], dirty[0][elsewhere])
    # Gradients may be added up in any order, so two clean runs need not be equal either; but a
    # gradient that saw the huge values would be off by more than bfloat16 rounds it.
    for before, after, reference in zip(clean[1:], dirty[1:], exact[1:], strict=True):
        before, after, reference = (x[elsewhere].float() for x in (before, after, reference))
        assert (after - before).norm() <= (before - reference).norm()


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "flash_attn"])
def test_a_packed_model_equals_the_documents_alone(family: str, backend: str) -> None:
    """bfloat16 for the kernels that want it, float32 for the others.

    The limit is twice the error of torchtune's own dense path on the same pack in the same dtype,
    both against float64; in float32 at least 1e-3 of the value, since the kernels may use TF32.
    """
    dtype = torch.bfloat16 if backend in ("varlen", "flash_attn") else torch.float32
    if family == "gemma2" and backend in ("varlen", "flash_attn"):
        pytest.skip(f"{backend} is refused for gemma2, which tests/test_attention.py checks")
    skip_unless_possible(backend, 64, dtype)
    changes = {"head_dim": 64} if family == "gemma2" else {"embed_dim": 256}
    model = tiny(family, **changes).to(CUDA, dtype)
    batch = Batch([[33, 2, 1, 1], [60], [5, 5, 5, 5, 5, 40]], 70)
    with all_float64():
        exact = batch.alone(copy.deepcopy(model).to("cpu", torch.float64))
    batch = on_cuda(batch)
    dense = batch.run(copy.deepcopy(model), batch.mask)
    attn = install_attention(model, backend, device=CUDA, dtype=dtype)
    assert attn.backend == backend, attn.reason
    packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
    assert set(attn.describe_layers().values()) == {backend}
    assert_no_worse(packed, dense, exact, floor=1e-3 if dtype == torch.float32 else 0.0)


@pytest.mark.parametrize("build", [tiny, tiny_lora], ids=["full", "lora"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("saving", ["checkpointing", "offloading", "both"])
@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "flash_attn"])
def test_B42_every_combination_equals_the_documents_alone(
    backend: str, saving: str, compiled: bool, build: Callable[..., Any]
) -> None:
    """torchtune's ``OffloadActivations`` itself, with its own stream; limits as above.

    The next batch's mask is made before the backward, whose recomputed forward must not see it.
    Two steps, since offloading sets its hooks up anew for each graph.
    """
    dtype = torch.bfloat16
    skip_unless_possible(backend, 64, dtype)
    torch.compiler.reset()
    model = build("llama3", embed_dim=256).to(CUDA, dtype)
    batch = Batch([[33, 2, 1, 1], [60], [5, 5, 5, 5, 5, 40]], 70)
    with all_float64():
        exact = batch.alone(copy.deepcopy(model).to("cpu", torch.float64))
    batch = on_cuda(batch)
    dense = batch.run(copy.deepcopy(model), batch.mask)
    if compiled:
        training.compile_model(model, verbose=False)
    if saving != "offloading":
        training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    attn = install_attention(model, backend, device=CUDA, dtype=dtype)
    assert attn.backend == backend, attn.reason
    offloading: Any = nullcontext()
    if saving != "checkpointing":
        offloading = training.get_act_offloading_ctx_manager(model, True)

    class MakesTheNextMask(nn.Module):
        def forward(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            with offloading:
                logits: torch.Tensor = model(tokens, **kwargs)
            attn.prepare(torch.tensor([[35, 35]] * 3, dtype=torch.int32), 70)
            return logits

        zero_grad = model.zero_grad
        named_parameters = model.named_parameters

    for _ in range(2):
        result = batch.run(MakesTheNextMask(), attn.prepare(batch.seq_lens, batch.s))
        result.grads = {
            name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): grad
            for name, grad in result.grads.items()
        }
        assert_no_worse(result, dense, exact)


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
