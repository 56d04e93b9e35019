"""Installing a backend into a torchtune model: what is chosen, taken and refused."""

import pytest
import torch
from torchtune.models.llama3 import llama3
from torchtune.modules import TransformerDecoder

from torchtune_packing.attention import install_attention
from torchtune_packing.layout import DocumentLayout


def tiny_llama(**kwargs: object) -> TransformerDecoder:
    sizes = {
        "vocab_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "max_seq_len": 64,
        "intermediate_dim": 48,
    }
    return llama3(**{**sizes, **kwargs})


def test_auto_takes_varlen_on_the_cpu_and_says_so_in_one_line() -> None:
    attn = install_attention(tiny_llama(), device="cpu", dtype=torch.float32)
    assert attn.backend == "varlen"
    assert "varlen" in attn.reason and "cpu" in attn.reason and "\n" not in attn.reason
    assert attn.describe_layers() == {"layers.0.attn": "varlen", "layers.1.attn": "varlen"}
    assert isinstance(attn.prepare(torch.tensor([[2, 3]]), 5), DocumentLayout)


def test_b11_a_packed_model_without_its_mask_is_an_error() -> None:
    model = tiny_llama()
    for backend in ("varlen", "sdpa"):
        install_attention(model, backend, device="cpu", dtype=torch.float32)
        with pytest.raises(ValueError, match="mask=None.*seq_lens"):
            model(torch.zeros(1, 5, dtype=torch.long))


def test_attention_dropout_is_refused_under_varlen_and_given_sdpa_by_auto() -> None:
    model = tiny_llama(attn_dropout=0.1)
    with pytest.raises(ValueError, match="attn_dropout is 0.1"):
        install_attention(model, "varlen", device="cpu", dtype=torch.float32)
    assert install_attention(model, device="cpu", dtype=torch.float32).backend == "sdpa"
