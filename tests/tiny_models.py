"""Tiny models of every family, packed batches, and the same documents one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex_module
from torchtune.models.gemma._component_builders import gemma, lora_gemma
from torchtune.models.gemma2._component_builders import gemma2, lora_gemma2
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.models.llama3_1 import llama3_1, lora_llama3_1
from torchtune.models.llama3_2._component_builders import llama3_2, lora_llama3_2
from torchtune.models.mistral import lora_mistral, mistral
from torchtune.models.phi3 import lora_phi3, phi3
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules import TransformerDecoder

from torchtune_packing import PackedDataset, attention, attention_choice
from torchtune_packing.attention_kernels import Flex
from torchtune_packing.datasets import packed_dataset
from torchtune_packing.models.smollm2 import builders

VOCAB = 64

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 128,
}
_GEMMA: dict[str, Any] = {**_SIZES, "head_dim": 12, "num_kv_heads": 1}
# The window is shorter than the documents, so that it matters.
_GEMMA2: dict[str, Any] = {**_GEMMA, "num_kv_heads": 2, "sliding_window_size": 10}


def lora_code_llama2(*, rope_base: int, **options: Any) -> TransformerDecoder:
    """Code Llama's LoRA form; torchtune 0.6.1 leaves its rotary base at Llama 2's."""
    return lora_llama2(**options)


def smollm2(**sizes: Any) -> TransformerDecoder:
    """SmolLM2 as this package builds it, with a small vocabulary."""
    return _small_smollm2(sizes, lambda size: builders._decoder(size, builders._plain_linear))


def lora_smollm2(
    *,
    lora_attn_modules: list[str],
    lora_rank: int,
    lora_alpha: float,
    use_dora: bool = False,
    quantize_base: bool = False,
    **sizes: Any,
) -> TransformerDecoder:
    """The same with adapters."""
    return _small_smollm2(
        sizes,
        lambda size: builders._lora_decoder(
            size,
            lora_attn_modules,
            False,
            False,
            rank=lora_rank,
            alpha=lora_alpha,
            dropout=0.0,
            use_dora=use_dora,
            quantize_base=quantize_base,
        ),
    )


def _small_smollm2(
    sizes: dict[str, Any], build: Callable[[Any], TransformerDecoder]
) -> TransformerDecoder:
    sizes = dict(sizes)
    limits = {"VOCAB_SIZE": sizes.pop("vocab_size"), "MAX_SEQ_LEN": sizes.pop("max_seq_len")}
    with mock.patch.multiple(builders, **limits):
        return build(builders._Size(**sizes, rope_base=builders._SIZE_135M.rope_base))


#: Family -> its component builder, its LoRA builder and the sizes, which keep what sets the family
#: apart (heads, rotary base, window).
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "llama2": (llama2, lora_llama2, {**_SIZES, "num_kv_heads": 4}),
    "code_llama2": (
        llama2,
        lora_code_llama2,
        {**_SIZES, "num_kv_heads": 4, "rope_base": 1_000_000},
    ),
    "llama3": (llama3, lora_llama3, _SIZES),
    "llama3_1": (llama3_1, lora_llama3_1, _SIZES),
    "llama3_2": (llama3_2, lora_llama3_2, _SIZES),
    "smollm2": (
        smollm2,
        lora_smollm2,
        {**_SIZES, "num_heads": 3, "num_kv_heads": 1, "embed_dim": 48},
    ),
    "mistral": (mistral, lora_mistral, _SIZES),
    "qwen2": (qwen2, lora_qwen2, {**_SIZES, "tie_word_embeddings": True}),
    "qwen2_5": (qwen2, lora_qwen2, {**_SIZES, "tie_word_embeddings": False}),
    "gemma": (gemma, lora_gemma, _GEMMA),
    "gemma2": (gemma2, lora_gemma2, _GEMMA2),
    "phi3": (phi3, lora_phi3, {**_SIZES, "num_kv_heads": 4}),
    "phi4": (phi3, lora_phi3, _SIZES),
}


def tiny(family: str, **changes: Any) -> TransformerDecoder:
    """A tiny model of a family with random weights, in float32."""
    build, _, sizes = FAMILIES[family]
    return _randomised(build(**{**sizes, **changes}))


def tiny_lora(family: str, **changes: Any) -> TransformerDecoder:
    """Its LoRA form, B matrices random too, or the adapters would do nothing."""
    _, build, sizes = FAMILIES[family]
    lora = {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "lora_rank": 2}
    return _randomised(build(**{**sizes, **lora, "lora_alpha": 4.0, **changes}))


def _randomised(model: TransformerDecoder) -> TransformerDecoder:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if type(parameter.data) is torch.Tensor:  # and not a quantised one
                parameter.copy_(0.2 * noise if noise.dim() > 1 else 1 + 0.1 * noise)
    return model


class Batch:
    """Documents of random tokens, packed by hand into rows of s positions."""

    def __init__(self, rows: Sequence[Sequence[int]], s: int, *, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(1)
        d = max(len(row) for row in rows) + 1
        self.s = s
        self.tokens = torch.randint(0, vocab, (len(rows), s), generator=generator)
        self.input_pos = torch.zeros(len(rows), s, dtype=torch.long)
        self.seq_lens = torch.zeros(len(rows), d, dtype=torch.int32)
        self.real_lengths = torch.tensor([sum(row) for row in rows])
        self.mask = torch.zeros(len(rows), s, s, dtype=torch.bool)
        #: (row, slice) of each document
        self.places: list[tuple[int, slice]] = []
        for row, lengths in enumerate(rows):
            start = 0
            tail = [s - sum(lengths)] if sum(lengths) < s else []
            for column, length in enumerate([*lengths, *tail]):
                place = slice(start, start + length)
                self.input_pos[row, place] = torch.arange(length)
                self.mask[row, place, place] = torch.ones(length, length).tril().bool()
                self.seq_lens[row, column] = length
                if column < len(lengths):
                    self.places.append((row, place))
                start += length

    def run(self, model: nn.Module, mask: object) -> Result:
        """Loss, logits and gradients of the packed batch."""
        model.zero_grad()
        logits = model(self.tokens, input_pos=self.input_pos, mask=mask)
        documents = [logits[row, place] for row, place in self.places]
        loss = sum(
            _loss(x, self.tokens[row, place])
            for x, (row, place) in zip(documents, self.places, strict=True)
        )
        return Result(model, [x.detach() for x in documents], loss)

    def alone(self, model: nn.Module) -> Result:
        """The same documents one at a time, without mask or positions."""
        model.zero_grad()
        documents, total = [], 0.0
        for row, place in self.places:
            tokens = self.tokens[row, place]
            logits = model(tokens[None])[0]
            loss = _loss(logits, tokens)
            if loss.requires_grad:
                loss.backward()
            documents.append(logits.detach())
            total = total + loss.detach()
        return Result(model, documents, total)


class Result:
    """Logits per document, the summed loss, and a copy of every gradient."""

    def __init__(self, model: nn.Module, documents: list[torch.Tensor], loss: Any) -> None:
        if loss.requires_grad:
            loss.backward()
        self.documents = documents
        self.loss = loss.item()
        self.grads = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }

    def assert_equals(self, expected: Result, *, logits: float, loss: float, grads: float) -> None:
        """Largest difference of logits; relative difference of loss and of each gradient."""
        for ours, theirs in zip(self.documents, expected.documents, strict=True):
            assert (ours - theirs).abs().max().item() <= logits
        assert abs(self.loss - expected.loss) <= loss * abs(expected.loss)
        assert self.grads.keys() == expected.grads.keys()
        for name, theirs in expected.grads.items():
            difference = (self.grads[name] - theirs).norm().item()
            assert difference <= grads * theirs.norm().item(), (name, difference)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")


def let_flex_differentiate_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as torch computes it without a kernel: any dtype, and gradients on the CPU.

    Its compiled CPU kernel takes no float64 and has no backward. The unfused form reads the same
    BlockMask and score_mod, and differentiates once the check that forbids it is out of the way.
    """

    def unfused(backend: str, device: torch.device) -> list[Any]:
        return [Flex(compiled=False)] if backend == "flex" else original(backend, device)

    original = attention_choice.kernels
    monkeypatch.setattr(attention, "kernels", unfused)
    monkeypatch.setattr(attention_choice, "_flex_obstacle", lambda *_: None)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)


@contextmanager
def all_float64() -> Iterator[None]:
    """Makes ``Tensor.float()`` leave float64 tensors alone.

    torchtune casts to float32 in its norms, its rotary embeddings, Gemma 2's softmax and the
    logits, whatever the model's dtype. In a float64 model that would round the very differences
    away, or blow them up, that a test in float64 is after.
    """
    original = torch.Tensor.float

    def cast(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else original(self, *args, **kwargs)

    torch.Tensor.float = cast  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = original  # type: ignore[method-assign]


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread: for tensors this small a second one costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _OneDocument(PackedDataset):
    """Packs that say of themselves that they hold one document."""

    def __getitem__(self, index: int) -> Any:
        pack = super().__getitem__(index)
        return {**pack, "seq_lens": pack["seq_lens"].sum(0, keepdim=True)}


def packs_of_one_document(tokenizer: Any, **options: Any) -> PackedDataset:
    """A component for configs: positions run on, and the documents of a pack see each other."""
    packs = packed_dataset(tokenizer, **options)
    packs.__class__ = _OneDocument
    return packs
