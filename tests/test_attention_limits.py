"""Where attention stops with an error instead of running something else: graphs, memory, masks."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiny_models import Batch, tiny
from torchtune_packing import attention, attention_kernels
from torchtune_packing.attention import install_attention
from torchtune_packing.attention_kernels import CpuVarlen, Flex
from torchtune_packing.masks import block_causal_block_mask

BATCH = Batch([[9, 1, 20], [30, 5]], 36)


@pytest.fixture
def traced_flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention traced for each shape like on a GPU, and not lowered, which takes seconds."""
    compile_ = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(attention_kernels.torch, "compile", compile_)
    attention_kernels._compiled_flex.cache_clear()
    torch.compiler.reset()
    yield
    attention_kernels._compiled_flex.cache_clear()
    torch.compiler.reset()


def flex_at(s: int) -> None:
    q, k, v = (torch.randn(1, s, heads, 8) for heads in (2, 1, 1))
    mask = block_causal_block_mask(torch.tensor([[s - 20, 20]], dtype=torch.int32), s)
    Flex()(object(), q, k, v, mask)


@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
@torch.no_grad()
def test_B37_a_dozen_shapes_of_flex_stay_compiled(traced_flex: None) -> None:
    """torch's own limit is 8; after it FlexAttention would run unfused and hold all scores."""
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for s in range(40, 52):
        flex_at(s)
    assert counters["unique_graphs"] - before == 12


@torch.no_grad()
def test_B37_flex_past_its_limit_of_graphs_is_an_error(traced_flex: None, monkeypatch) -> None:
    monkeypatch.setattr(attention_kernels, "_MOST_GRAPHS", 3)
    for s in (40, 41, 42):
        flex_at(s)
    with pytest.raises(Exception, match="fullgraph"):
        flex_at(43)


class TooLarge(CpuVarlen):
    """Passes the trial of one row, and wants more memory than there is for two."""

    def __call__(self, layer, q, k, v, mask):
        if q.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(layer, q, k, v, mask)


def test_out_of_memory_is_not_answered_by_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention, "kernels", lambda backend, _: [TooLarge()] if backend == "varlen" else []
    )
    model = tiny("llama3")
    attn = install_attention(model, "varlen", device="cpu", dtype=torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        BATCH.run(model, attn.prepare(BATCH.seq_lens, BATCH.s))
    assert attn.backend == "varlen"


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(2, 36, dtype=torch.bool), "torch.bool tensor of 2 dimensions"),
        (torch.ones(2, 36, dtype=torch.int64), "torch.int64 tensor of 2 dimensions"),
        # A float mask is added to the scores, where ones hide nothing.
        (torch.ones(2, 36, 36), "torch.float32 tensor of 3 dimensions"),
    ],
    ids=["bool", "int64", "float"],
)
def test_B11_an_all_ones_mask_is_refused(mask: torch.Tensor, said: str, backend: str) -> None:
    model: Any = tiny("llama3")
    install_attention(model, backend, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=said):
        model(BATCH.tokens, input_pos=BATCH.input_pos, mask=mask)
