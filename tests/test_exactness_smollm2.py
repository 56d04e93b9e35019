"""Packed equals unpacked on a real model and real data: SmolLM2 in float32 on docstrings."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torchtune.modules import TransformerDecoder
from torchtune.training import FullModelHFCheckpointer

from tests.tiny_models import one_thread
from torchtune_packing.attention import install_attention
from torchtune_packing.datasets import python_docstrings_dataset
from torchtune_packing.models.smollm2 import smollm2_135m, smollm2_tokenizer

NUM_TOKENS = 320


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def documents(smollm2_dir) -> list[torch.Tensor]:
    """Tokens of a few functions with their docstrings, lengths mixed, 320 tokens in all."""
    dataset = python_docstrings_dataset(smollm2_tokenizer(str(smollm2_dir)), split="validation")
    chosen: list[torch.Tensor] = []
    for index in range(len(dataset)):
        tokens = torch.tensor(dataset[index]["tokens"])
        if len(tokens) + sum(map(len, chosen)) <= NUM_TOKENS:
            chosen.append(tokens)
    assert len(chosen) >= 3
    return chosen


@pytest.fixture(scope="module")
def model(smollm2_dir, tmp_path_factory) -> Iterator[TransformerDecoder]:
    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=str(smollm2_dir),
        checkpoint_files=["model.safetensors"],
        model_type="LLAMA3_2",
        output_dir=str(tmp_path_factory.mktemp("output")),
    )
    model = smollm2_135m()
    model.load_state_dict(checkpointer.load_checkpoint()["model"])
    yield model.float()


def summed_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")


def grad_norm(model: nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])))


def test_packed_smollm2_equals_unpacked_on_docstrings(model, documents) -> None:
    alone = 0.0
    for tokens in documents:
        loss = summed_loss(model(tokens[None])[0], tokens)
        loss.backward()
        alone += loss.item()
    alone_norm = grad_norm(model)
    model.zero_grad()

    lengths = [len(tokens) for tokens in documents]
    tokens = torch.cat([*documents, torch.zeros(NUM_TOKENS - sum(lengths) + 5, dtype=torch.long)])
    tail = len(tokens) - sum(lengths)
    input_pos = torch.cat([torch.arange(n) for n in [*lengths, tail]])
    attn = install_attention(model, device="cpu", dtype=torch.float32)
    assert attn.backend == "varlen"
    mask = attn.prepare(torch.tensor([[*lengths, tail]], dtype=torch.int32), len(tokens))
    logits = model(tokens[None], input_pos=input_pos[None], mask=mask)[0]
    parts = zip(logits.split([*lengths, tail])[:-1], documents, strict=True)
    loss = torch.stack([summed_loss(part, document) for part, document in parts]).sum()
    loss.backward()

    assert abs(loss.item() - alone) <= 1e-5 * alone
    assert abs(grad_norm(model) - alone_norm) <= 1e-4 * alone_norm
