"""Whole models under every backend that can be run here, the GPU's ones by their stand-ins.

``flash_attn`` and ``torch.nn.attention.varlen`` need a GPU. Their stand-ins (pure torch, in
``test_attention_kernels``) are put where the package looks for them, so that what runs is the
package's own way to them: the choice, the adapter, the layers.
"""

import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.test_attention_kernels import (
    flash_attn_varlen_func,
    varlen_attn_2_10,
    varlen_attn_2_11,
)
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
from torchtune_packing import attention, attention_choice, attention_cpu, attention_kernels
from torchtune_packing.attention import InstalledAttention, install_attention

CUDA = torch.device("cuda")
STAND_INS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "varlen 2.10": ("varlen", varlen_attn_2_10),
    "varlen 2.11": ("varlen", varlen_attn_2_11),
    "flash_attn": ("flash_attn", flash_attn_varlen_func),
}
HERE = ("sdpa", "varlen", "flex")
EVERYWHERE = (*HERE, *STAND_INS)

BATCH = Batch([[33, 2, 1, 1], [60], [5, 5, 5, 5, 5, 40]], 70)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


Install = Callable[..., InstalledAttention]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(model, name, dtype)`` with one of ``EVERYWHERE``, on the CPU."""

    def stand_in(name: str, spy: Callable[..., Any] | None) -> str:
        backend, function = STAND_INS[name]
        function = spy or function
        package = types.ModuleType("flash_attn")
        package.flash_attn_varlen_func = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        monkeypatch.setattr(attention_choice, "_fused_varlen_obstacle", lambda *_: None)
        for_cuda = attention_choice.kernels(backend, CUDA)
        monkeypatch.setattr(
            attention, "kernels", lambda asked, _: for_cuda if asked == backend else []
        )
        return backend

    def run(
        model: Any, name: str, dtype: torch.dtype, *, spy: Callable[..., Any] | None = None
    ) -> InstalledAttention:
        if name in STAND_INS:
            backend = stand_in(name, spy)
        else:
            backend = name
            let_flex_differentiate_on_cpu(monkeypatch)
        attn = install_attention(model, backend, device="cpu", dtype=dtype)
        assert attn.backend == backend, attn.reason
        return attn

    return run


def packed(model: Any, attn: InstalledAttention, batch: Batch) -> Result:
    """The batch under the installed backend, which every layer must have run."""
    result = batch.run(model, attn.prepare(batch.seq_lens, batch.s))
    assert set(attn.describe_layers().values()) == {attn.backend}
    return result


# Reported faults, on models


@pytest.mark.parametrize("name", EVERYWHERE)
def test_B2_a_pack_costs_the_sum_of_its_documents_and_has_their_gradients(
    name: str, install: Install
) -> None:
    """Samples of 5, 3, 7 and 2 tokens alone, then as one pack with L=17."""
    batch = Batch([[5, 3, 7, 2]], 17)
    model = tiny("llama3").eval()
    expected = batch.alone(tiny("llama3").eval())
    attn = install(model, name, torch.float32)
    packed(model, attn, batch).assert_equals(expected, logits=1e-5, loss=1e-5, grads=1e-5)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_B2_no_token_of_document_1_changes_a_logit_of_documents_2_to_4(
    name: str, install: Install
) -> None:
    batch = Batch([[5, 3, 7, 2]], 17)
    model = tiny("llama3").eval()
    attn = install(model, name, torch.float32)
    first, *before = packed(model, attn, batch).documents
    for position in range(5):
        batch.tokens[0, position] = (batch.tokens[0, position] + 1) % 64
        changed, *after = packed(model, attn, batch).documents
        assert not torch.equal(changed[position:], first[position:])
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), position


@pytest.mark.parametrize("name", EVERYWHERE)
def test_B10_the_second_copy_of_a_document_has_the_logits_of_the_first(
    name: str, install: Install
) -> None:
    """Two copies of 20 tokens, L=40; plain causal attention would show copy 2 the first one."""
    batch = Batch([[20, 20]], 40)
    batch.tokens[0, 20:] = batch.tokens[0, :20]
    model = tiny("llama3").double()
    with all_float64():
        one, two = packed(model, install(model, name, torch.float64), batch).documents
    assert (one - two).abs().max() <= 1e-12


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("head_dim", [8, 24, 72, 96, 192])
def test_B39_models_of_any_head_dim_are_exact(head_dim: int, name: str, install: Install) -> None:
    """A step: logits, loss, gradients, in float64. (``flex`` by torch's unfused form.)"""

    def model() -> Any:
        made = tiny("gemma", head_dim=head_dim, num_heads=4, num_kv_heads=2).double()
        assert made.layers[0].attn.head_dim == head_dim
        return made

    batch = Batch([[9, 1, 20], [30, 5]], 36)
    with all_float64():
        expected = batch.alone(model())
        ours = model()
        attn = install(ours, name, torch.float64)
        packed(ours, attn, batch).assert_equals(expected, logits=1e-9, loss=1e-10, grads=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("head_dim", [8, 24, 72, 96, 192])
def test_B39_models_of_any_head_dim_under_compiled_flex(head_dim: int, caplog: Any) -> None:
    """What torch compiles for this CPU takes them; there is nothing to warn of."""
    batch = Batch([[9, 1, 20, 130, 77]], 256)
    changes: dict[str, Any] = {"head_dim": head_dim, "num_heads": 2, "max_seq_len": 256}
    expected = batch.alone(tiny("gemma", **changes))
    model = tiny("gemma", **changes)
    with caplog.at_level(logging.WARNING, "torchtune_packing"):
        attn = install_attention(
            model, "flex", device="cpu", dtype=torch.float32, forward_only=True
        )
        ours = packed(model, attn, batch)
    assert attn.backend == "flex" and not caplog.records
    ours.assert_equals(expected, logits=1e-4, loss=1e-5, grads=0)


# The GPU's backends, family by family


@pytest.mark.parametrize("build", [tiny, tiny_lora], ids=["full", "lora"])
@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked_under_what_runs_on_a_gpu(
    family: str, name: str, build: Callable[[str], Any], install: Install
) -> None:
    with all_float64():
        model = build(family).double()
        if family == "gemma2":
            with pytest.raises(ValueError, match="soft-capped, sliding-window attention of Gemma2"):
                install(model, name, torch.float64)
            return
        expected = BATCH.alone(build(family).double())
        attn = install(model, name, torch.float64)
        packed(model, attn, BATCH).assert_equals(expected, logits=1e-9, loss=1e-10, grads=1e-8)


# Grouped heads are handed on, not copied


class Spy:
    """Calls a function and keeps what it was called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)  # and with it the signature
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


def grouped() -> Any:
    model = tiny("llama3", num_heads=6, num_kv_heads=2, embed_dim=48)
    assert (model.layers[0].attn.num_heads, model.layers[0].attn.num_kv_heads) == (6, 2)
    return model


@pytest.mark.parametrize(
    ("name", "heads"), [("varlen 2.10", 6), ("varlen 2.11", 2), ("flash_attn", 2)]
)
def test_fused_kernels_get_key_and_value_heads_without_copies(
    name: str, heads: int, install: Install
) -> None:
    """All but ``varlen_attn`` of torch 2.10, which has no word for grouped heads."""
    spy = Spy(STAND_INS[name][1])
    model = grouped()
    attn = install(model, name, torch.float32, spy=spy)
    spy.calls.clear()
    packed(model, attn, BATCH)
    assert len(spy.calls) == 2
    for (q, k, v, *_), options in spy.calls:
        assert [x.shape for x in (q, k, v)] == [(210, 6, 8), (210, heads, 8), (210, heads, 8)]
        assert ("enable_gqa" in options) is (name == "varlen 2.11")


def test_flex_gets_key_and_value_heads_without_copies(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(attention_kernels.flex_attention)
    monkeypatch.setattr(attention_kernels, "flex_attention", spy)
    model = grouped()
    attn = install(model, "flex", torch.float32)
    spy.calls.clear()
    packed(model, attn, BATCH)
    assert len(spy.calls) == 2
    for (q, k, v), options in spy.calls:
        assert [x.shape for x in (q, k, v)] == [(3, 6, 70, 8), (3, 2, 70, 8), (3, 2, 70, 8)]
        assert options["enable_gqa"] is True


def test_the_cpu_kernel_reads_one_copy_of_each_key_and_value_head(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward: the heads of a group lie at the same place in memory, stride 0."""
    spies = [Spy(attention_cpu._flash_forward), Spy(attention_cpu._flash_backward)]
    monkeypatch.setattr(attention_cpu, "_flash_forward", spies[0])
    monkeypatch.setattr(attention_cpu, "_flash_backward", spies[1])
    model = grouped()
    attn = install(model, "varlen", torch.float32)
    for spy in spies:
        spy.calls.clear()
    packed(model, attn, BATCH)
    documents = int((BATCH.seq_lens > 0).sum())
    assert [len(spy.calls) for spy in spies] == [2 * documents] * 2
    for (_, k, v, *_), _ in spies[0].calls:
        assert k.shape[:2] == v.shape[:2] == (2, 3) and k.stride(1) == v.stride(1) == 0
    for (_, _, k, v, *_), _ in spies[1].calls:
        assert k.shape[:2] == v.shape[:2] == (2, 3) and k.stride(1) == v.stride(1) == 0
