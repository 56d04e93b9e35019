"""Kernels that fail or are wrong: found at set-up or at the first call, replaced once, and said."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from tests.tiny_models import Batch, one_thread, tiny
from torchtune_packing import attention, attention_choice, attention_kernels
from torchtune_packing.attention import install_attention
from torchtune_packing.attention_kernels import CpuVarlen, Flex

BATCH = Batch([[9, 1, 20], [30, 5]], 36)
SWITCH = "attention_backend=sdpa"


class OutOfResources(RuntimeError):
    """What Triton raises when a kernel wants more shared memory than the GPU has."""


def out_of_resources(*_: Any, **__: Any) -> torch.Tensor:
    raise OutOfResources("shared memory, Required: 147456, Hardware limit: 101376")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def small_tiles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which compiled flex runs with small tiles and fails with torch's own choice."""

    def compiled(*args: Any, kernel_options: Any = None, **kwargs: Any) -> torch.Tensor:
        if kernel_options is None:
            out_of_resources()
        return torch.nn.attention.flex_attention.flex_attention(*args, **kwargs)

    monkeypatch.setattr(attention_kernels, "_compiled_flex", lambda: compiled)
    monkeypatch.setattr(
        attention, "kernels", lambda *_: attention_choice.kernels("flex", torch.device("cuda"))
    )


def install_flex(model: torch.nn.Module) -> attention.InstalledAttention:
    return install_attention(model, "flex", device="cpu", dtype=torch.float32, forward_only=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_B40_flex_that_lacks_shared_memory_gets_smaller_tiles(small_tiles_only, caplog) -> None:
    model = tiny("llama3")
    with caplog.at_level(logging.WARNING):
        attn = install_flex(model)
    assert attn.backend == "flex"
    assert "OutOfResources" in attn.reason
    assert [SWITCH in record.message for record in caplog.records] == [True]
    with torch.no_grad():
        mask = attn.prepare(BATCH.seq_lens, BATCH.s)
        logits = model(BATCH.tokens, input_pos=BATCH.input_pos, mask=mask)
        expected = model(BATCH.tokens, input_pos=BATCH.input_pos, mask=BATCH.mask)
    torch.testing.assert_close(logits, expected)


def test_B40_flex_that_fails_at_its_first_call_is_found_at_set_up(monkeypatch, caplog) -> None:
    """Wrapping fails at no time; calling does, and that is when it is caught."""
    monkeypatch.setattr(attention_kernels, "_compiled_flex", lambda: out_of_resources)
    model = tiny("gemma", head_dim=128, embed_dim=32)
    with caplog.at_level(logging.WARNING):
        attn = install_flex(model)
    assert attn.backend == "sdpa"
    (record,) = caplog.records
    for part in ("head_dim [128]", "OutOfResources", SWITCH):
        assert part in record.message
    batch = BATCH.run(model, attn.prepare(BATCH.seq_lens, BATCH.s))
    batch.assert_equals(
        BATCH.alone(tiny("gemma", head_dim=128)), logits=1e-4, loss=1e-5, grads=1e-4
    )


def test_B39_a_head_dim_that_a_kernel_refuses_falls_back_with_one_warning(monkeypatch, caplog):
    def needs_a_power_of_two(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        raise ValueError(f"NYI: embedding dimension {q.shape[-1]} must be a power of 2")

    monkeypatch.setattr(attention_kernels, "_compiled_flex", lambda: needs_a_power_of_two)
    with caplog.at_level(logging.WARNING):
        attn = install_flex(tiny("gemma"))
    assert attn.backend == "sdpa"
    assert ["head_dim [12]" in record.message for record in caplog.records] == [True]


class Leaky(CpuVarlen):
    """Runs, and lets every row be one document."""

    def __call__(self, layer, q, k, v, mask):
        spans = torch.tensor([[0], [q.shape[1]]], dtype=torch.int32)
        return attention_kernels.document_attention_cpu(q, k, v, spans)


class Forgetful(CpuVarlen):
    """Right in the forward, wrong in the backward of the keys."""

    def __call__(self, layer, q, k, v, mask):
        return super().__call__(layer, q, k.detach() + 0 * k, v, mask)


@pytest.mark.parametrize("wrong", [Leaky(), Forgetful()])
def test_a_kernel_with_wrong_numbers_is_not_used(wrong, monkeypatch, caplog) -> None:
    monkeypatch.setattr(
        attention, "kernels", lambda backend, _: [wrong] if backend != "sdpa" else []
    )
    with caplog.at_level(logging.WARNING):
        attn = install_attention(tiny("llama3"), device="cpu", dtype=torch.float32)
    assert attn.backend == "sdpa"
    assert "its result is wrong for head_dim 8" in attn.reason
    assert len(caplog.records) == 1


class FailsOnLargeBatches(CpuVarlen):
    """Passes the trial of 256 positions in one row, and fails on two rows."""

    calls = 0

    def __call__(self, layer, q, k, v, mask):
        if q.shape[0] > 1:
            type(self).calls += 1
            out_of_resources()
        return super().__call__(layer, q, k, v, mask)


def test_B40_a_kernel_that_fails_at_its_first_real_call_is_replaced_once(monkeypatch, caplog):
    FailsOnLargeBatches.calls = 0
    broken = FailsOnLargeBatches()
    monkeypatch.setattr(
        attention, "kernels", lambda backend, _: [broken] if backend == "varlen" else []
    )
    model = tiny("llama3")
    expected = BATCH.alone(tiny("llama3"))
    attn = install_attention(model, "varlen", device="cpu", dtype=torch.float32)
    mask = attn.prepare(BATCH.seq_lens, BATCH.s)
    with caplog.at_level(logging.WARNING):
        BATCH.run(model, mask).assert_equals(expected, logits=1e-4, loss=1e-5, grads=1e-4)
        assert set(attn.describe_layers().values()) == {"sdpa"}
        assert attn.backend == "sdpa"
        mask = attn.prepare(BATCH.seq_lens, BATCH.s)
        assert torch.equal(mask, BATCH.mask)
        BATCH.run(model, mask).assert_equals(expected, logits=1e-4, loss=1e-5, grads=1e-4)
    assert FailsOnLargeBatches.calls == 1
    assert [SWITCH in record.message for record in caplog.records] == [True]


def test_B40_in_a_distributed_job_a_failure_in_the_first_step_is_an_error(monkeypatch) -> None:
    """One rank must not go on with another kernel while the others do not know."""
    broken = FailsOnLargeBatches()
    monkeypatch.setattr(
        attention, "kernels", lambda backend, _: [broken] if backend == "varlen" else []
    )
    model = tiny("llama3")
    attn = install_attention(model, "varlen", device="cpu", dtype=torch.float32)
    monkeypatch.setattr(attention, "_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=f"OutOfResources.*{SWITCH}"):
        BATCH.run(model, attn.prepare(BATCH.seq_lens, BATCH.s))


def _rank(rank: int, folder: Path) -> None:
    """One of two ranks; flex works on rank 0 and fails on rank 1."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    if rank == 1:
        attention_kernels._compiled_flex = lambda: out_of_resources
    else:
        attention_choice.kernels.__globals__["Flex"] = lambda: Flex(compiled=False)
    attn = install_flex(tiny("llama3"))
    (folder / f"{rank}.txt").write_text(f"{attn.backend}|{attn.reason}")
    torch.distributed.destroy_process_group()


def test_B40_all_ranks_decide_alike(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    said = [(tmp_path / f"{rank}.txt").read_text().split("|") for rank in range(2)]
    assert [backend for backend, _ in said] == ["sdpa", "sdpa"]
    assert "it failed on another rank" in said[0][1]
    assert "OutOfResources" in said[1][1]
