"""Packed equals unpacked: every family under every backend, in float64 throughout.

The reference is torchtune's own model, not prepared for packing, run on one document at a time
without a mask. ``all_float64`` keeps torchtune from casting to float32 on the way, so the
differences left are those of float64 arithmetic in another order.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.models import (
    code_llama2,
    gemma,
    gemma2,
    llama2,
    llama3,
    llama3_1,
    llama3_2,
    mistral,
    phi3,
    phi4,
    qwen2,
    qwen2_5,
)
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from tests.tiny_models import (
    FAMILIES,
    Batch,
    Result,
    all_float64,
    let_flex_differentiate_on_cpu,
    one_thread,
    tiny,
    tiny_lora,
)
from torchtune_packing.attention import install_attention
from torchtune_packing.models.smollm2 import smollm2_135m

BACKENDS = ("sdpa", "varlen", "flex")

#: What is refused and why; every other pair of family and backend must be exact.
REFUSED = {("gemma2", "varlen"): "cannot do the soft-capped, sliding-window attention of Gemma2"}

BATCHES = {
    "one row": Batch([[1, 60, 7, 30, 2]], 100),
    "rows with padding": Batch([[33, 2, 1, 1], [60], [5, 5, 5, 5, 5, 40]], 70),
}


@pytest.fixture(autouse=True)
def _float64_on_one_thread() -> Iterator[None]:
    with one_thread(), all_float64():
        yield


@pytest.fixture
def differentiable_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    let_flex_differentiate_on_cpu(monkeypatch)


#: Family -> the builder that users name in a config, for one of the family's sizes.
REAL: dict[str, Callable[[], nn.Module]] = {
    "llama2": llama2.llama2_7b,
    "code_llama2": code_llama2.code_llama2_7b,
    "llama3": llama3.llama3_8b,
    "llama3_1": llama3_1.llama3_1_8b,
    "llama3_2": llama3_2.llama3_2_1b,
    "smollm2": smollm2_135m,
    "mistral": mistral.mistral_7b,
    "qwen2": qwen2.qwen2_0_5b,
    "qwen2_5": qwen2_5.qwen2_5_7b_base,
    "gemma": gemma.gemma_2b,
    "gemma2": gemma2.gemma2_2b,
    "phi3": phi3.phi3_mini,
    "phi4": phi4.phi4_14b,
}


def family_marks(model: Any) -> dict[str, object]:
    """What sets a family apart apart from its sizes."""
    first = model.layers[0].attn
    return {
        "attention": type(first),
        "rotary": (type(first.pos_embeddings), first.pos_embeddings.base),
        "grouped heads": first.num_kv_heads < first.num_heads,
        "biases": [getattr(first, name).bias is not None for name in ("q_proj", "output_proj")],
        "windows": [
            getattr(layer.attn, "sliding_window_size", None) is not None
            for layer in model.layers[:2]
        ],
        "norm": type(model.layers[0].sa_norm),
        "mlp": type(model.layers[0].mlp),
        "output": type(model.output),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_is_its_family_in_small(family: str) -> None:
    """The matrix below speaks of the models that users train, and of no other of that name."""
    with torch.device("meta"):
        real = REAL[family]()
    assert family_marks(tiny(family)) == family_marks(real)


@functools.cache
def unpacked(family: str, batch: str) -> Result:
    return BATCHES[batch].alone(tiny(family).double())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked(family: str, backend: str, differentiable_flex: None) -> None:
    model = tiny(family).double()
    if (family, backend) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family, backend]):
            install_attention(model, backend, device="cpu", dtype=torch.float64)
        return
    attn = install_attention(model, backend, device="cpu", dtype=torch.float64)
    assert attn.backend == backend
    for name, batch in BATCHES.items():
        packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
        packed.assert_equals(unpacked(family, name), logits=1e-9, loss=1e-10, grads=1e-8)
    assert set(attn.describe_layers().values()) == {backend}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_packed_equals_unpacked(family: str, backend: str, differentiable_flex: None) -> None:
    """Adapters on frozen weights, as they are trained; gradients of the adapters and no others."""
    model = tiny_lora(family).double()
    set_trainable_params(model, get_adapter_params(model))
    if (family, backend) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family, backend]):
            install_attention(model, backend, device="cpu", dtype=torch.float64)
        return
    unprepared = copy.deepcopy(model)
    attn = install_attention(model, backend, device="cpu", dtype=torch.float64)
    for batch in BATCHES.values():
        expected = batch.alone(unprepared)
        assert len(expected.grads) == 2 * 4 * 2 and all("lora_" in name for name in expected.grads)
        packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
        packed.assert_equals(expected, logits=1e-9, loss=1e-10, grads=1e-8)
    assert set(attn.describe_layers().values()) == {backend}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("adapted", ["q_proj", "k_proj", "v_proj"])
def test_lora_of_one_projection_is_exact_where_the_others_have_no_gradient(
    adapted: str, backend: str, differentiable_flex: None
) -> None:
    """In the first layer the kernel gets two of q, k and v that nothing is differentiated by."""
    model = tiny_lora("llama3", lora_attn_modules=[adapted], num_layers=1).double()
    set_trainable_params(model, get_adapter_params(model))
    batch = BATCHES["rows with padding"]
    expected = batch.alone(copy.deepcopy(model))
    assert len(expected.grads) == 2
    attn = install_attention(model, backend, device="cpu", dtype=torch.float64)
    assert attn.backend == backend, attn.reason
    packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
    packed.assert_equals(expected, logits=1e-9, loss=1e-10, grads=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_with_all_weights_trained_packed_equals_unpacked(family: str) -> None:
    """LoRA under what "auto" takes on the CPU; DoRA for one family."""
    model = tiny_lora(family, use_dora=family == "llama3").double()
    batch = BATCHES["rows with padding"]
    expected = batch.alone(copy.deepcopy(model))
    attn = install_attention(model, device="cpu", dtype=torch.float64)
    assert attn.backend == ("sdpa" if family == "gemma2" else "varlen")
    packed = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
    packed.assert_equals(expected, logits=1e-9, loss=1e-10, grads=1e-8)


def test_known_padding_changes_nothing_for_the_documents() -> None:
    model = tiny("llama3").double()
    attn = install_attention(model, "varlen", device="cpu", dtype=torch.float64)
    batch = BATCHES["rows with padding"]
    mask = attn.prepare(batch.seq_lens, batch.s, real_lengths=batch.real_lengths)
    expected = unpacked("llama3", "rows with padding")
    batch.run(model, mask).assert_equals(expected, logits=1e-9, loss=1e-10, grads=1e-8)
