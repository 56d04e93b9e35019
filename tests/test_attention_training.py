"""Backends with what recipes do to a model: checkpointing, offloading, compile, LoRA, FSDP.

Each combination must give the loss and the gradients of the plain run.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtune import training
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer

from tests.tiny_models import (
    Batch,
    Result,
    let_flex_differentiate_on_cpu,
    one_thread,
    tiny,
    tiny_lora,
)
from torchtune_packing.attention import install_attention

BATCH = Batch([[9, 1, 20], [30, 5]], 36)
NEXT_BATCH = Batch([[2, 2, 2, 2, 2, 2, 2], [11, 25]], 36)
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torchtune's compile_model reads this; Inductor itself is for the tests that name it.
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch.compiler.reset()
    with one_thread():
        yield


@pytest.fixture
def differentiable_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    let_flex_differentiate_on_cpu(monkeypatch)


def clean(result: Result) -> Result:
    result.grads = {
        name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in result.grads.items()
    }
    return result


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("build", [tiny, tiny_lora], ids=["full", "lora"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("saving", ["checkpointing", "offloading", "both"])
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_B42_every_combination_equals_the_plain_run(
    backend: str,
    saving: str,
    compiled: bool,
    build: Callable[..., TransformerDecoder],
    differentiable_flex: None,
) -> None:
    """The next batch's mask is made before the backward: a recomputed forward must not see it.

    ``save_on_cpu`` stands for torchtune's offloading, which wants CUDA streams (tests/gpu runs
    that one): both are hooks on saved tensors. The recipes offer offloading together with
    checkpointing only.
    """
    model = build("llama3", num_layers=1 if compiled else 2)
    expected = BATCH.run(copy.deepcopy(model), BATCH.mask)
    attn = install_attention(model, backend, **CPU)
    assert attn.backend == backend
    if compiled:
        training.compile_model(model, verbose=False)
    if saving != "offloading":
        training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    hooks = nullcontext() if saving == "checkpointing" else torch.autograd.graph.save_on_cpu()

    class MakesTheNextMask(nn.Module):
        def forward(self, tokens, **kwargs):
            with hooks:
                logits = model(tokens, **kwargs)
            attn.prepare(NEXT_BATCH.seq_lens, NEXT_BATCH.s)
            return logits

        zero_grad = model.zero_grad
        named_parameters = model.named_parameters

    mask = attn.prepare(BATCH.seq_lens, BATCH.s)
    result = clean(BATCH.run(MakesTheNextMask(), mask))
    result.assert_equals(expected, logits=1e-4, loss=1e-5, grads=1e-4)


def test_compiled_with_inductor_and_checkpointed_varlen_equals_the_plain_run(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "inductor")
    model = tiny("llama3", num_layers=1)
    expected = BATCH.run(copy.deepcopy(model), BATCH.mask)
    attn = install_attention(model, "varlen", **CPU)
    training.compile_model(model, verbose=False)
    training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    result = clean(BATCH.run(model, attn.prepare(BATCH.seq_lens, BATCH.s)))
    result.assert_equals(expected, logits=1e-4, loss=1e-5, grads=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_B37_twenty_steps_with_1_to_20_documents_compile_once(
    backend: str, differentiable_flex: None
) -> None:
    """Forward and backward graphs are counted; the first step makes them, the others none.

    ``fullgraph`` has it that nothing of a layer falls out of its one graph either.
    """
    graphs: list[int] = []

    def counting(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(len(inputs))
        return make_boxed_func(module.forward)

    compiler = torch._dynamo.backends.common.aot_autograd(fw_compiler=counting)
    model = tiny("llama3", num_layers=1)
    attn = install_attention(model, backend, **CPU)
    assert attn.backend == backend, attn.reason
    for layer in model.layers:
        layer.compile(backend=compiler, fullgraph=True)
    after_first = 0
    for step in range(20):
        lengths = [2] * step + [40 - 2 * step]
        batch = Batch([lengths], 40)
        # The collate function makes as many columns as the batch has documents.
        batch.seq_lens = batch.seq_lens[:, : step + 1]
        batch.run(model, attn.prepare(batch.seq_lens, batch.s))
        after_first = after_first or len(graphs)
    assert after_first > 0 and len(graphs) == after_first


@torch.no_grad()
@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
def test_B37_the_compiled_flex_of_eager_layers_serves_1_to_20_documents() -> None:
    """The real kernel of this CPU, which has no backward; its trial at set-up is the one graph.

    (Inductor of torch 2.13 cannot lower FlexAttention for a CPU inside a compiled layer.)
    """
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    model = tiny("llama3", num_layers=1, max_seq_len=256)
    expected = copy.deepcopy(model)
    attn = install_attention(model, "flex", forward_only=True, **CPU)
    assert attn.backend == "flex", attn.reason
    for step in range(20):
        batch = Batch([[10] * step + [256 - 10 * step]], 256)
        batch.seq_lens = batch.seq_lens[:, : step + 1]
        packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
        packed.assert_equals(batch.alone(expected), logits=1e-4, loss=1e-5, grads=0)
    assert graphs["unique_graphs"] - before == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex"])
def test_B42_the_recipes_compile_and_checkpoint_before_they_install(
    backend: str, differentiable_flex: None
) -> None:
    """Layers are compiled at their first call, when the attention in them is the packed one."""
    model = tiny("llama3")
    expected = copy.deepcopy(model)
    training.compile_model(model, verbose=False)
    training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    attn = install_attention(model, backend, **CPU)
    assert attn.backend == backend, attn.reason
    for batch in (BATCH, NEXT_BATCH):
        result = clean(batch.run(model, attn.prepare(batch.seq_lens, batch.s)))
        result.assert_equals(batch.alone(expected), logits=1e-4, loss=1e-5, grads=1e-4)


@pytest.mark.filterwarnings("ignore:.*Cannot dispatch to fused implementation")
@pytest.mark.parametrize("family", ["llama3", "gemma2", "phi3"])
def test_qlora_packed_equals_unpacked(family: str) -> None:
    """NF4 base weights, which need dimensions that fill its blocks of 64 * 256."""
    wide: dict[str, Any] = {"embed_dim": 128, "intermediate_dim": 128, "num_kv_heads": 4}
    if family == "gemma2":
        wide["head_dim"] = 32
    model = tiny_lora(family, quantize_base=True, **wide)
    assert "NF4Tensor" in type(model.layers[0].attn.q_proj.weight.data).__name__
    expected = BATCH.alone(copy.deepcopy(model))
    attn = install_attention(model, **CPU)
    packed = BATCH.run(model, attn.prepare(BATCH.seq_lens, BATCH.s))
    packed.assert_equals(expected, logits=1e-4, loss=1e-5, grads=1e-4)


def test_mixed_precision_sharding_leaves_the_layout_alone(tmp_path: Path) -> None:
    """FSDP2 casts a layer's floating-point arguments; the layout's integers are none of them."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = tiny("llama3")
        expected = BATCH.run(copy.deepcopy(model).bfloat16(), BATCH.mask)
        attn = install_attention(model, "varlen", device="cpu", dtype=torch.bfloat16)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        layout = attn.prepare(BATCH.seq_lens, BATCH.s)
        before = layout.cu_seqlens.clone()
        packed = BATCH.run(model, layout)
        assert torch.equal(layout.cu_seqlens, before) and layout.cu_seqlens.dtype == torch.int32
        assert abs(packed.loss - expected.loss) <= 0.02 * expected.loss
        # Sharding before the installation is as good.
        again = install_attention(model, "varlen", device="cpu", dtype=torch.bfloat16)
        repeated = BATCH.run(model, again.prepare(BATCH.seq_lens, BATCH.s))
        assert repeated.loss == packed.loss
    finally:
        torch.distributed.destroy_process_group()


def test_B36_a_smaller_last_batch_under_compile() -> None:
    """Two rows, then one, as the last batch of a validation set may be."""
    model = tiny("llama3")
    expected = copy.deepcopy(model)
    attn = install_attention(model, "varlen", **CPU)
    training.compile_model(model, verbose=False)
    for batch in (BATCH, Batch([[20, 16]], 36)):
        packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
        packed.assert_equals(batch.alone(expected), logits=1e-4, loss=1e-5, grads=1e-4)
