"""Installing a backend into a torchtune model: what is chosen, taken and refused."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torchtune import generation, training
from torchtune.modules import (
    MultiHeadAttention,
    TransformerCrossAttentionLayer,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.layer_dropout import prepare_layer_dropout
from torchtune.modules.model_fusion import FusionLayer

from tests.tiny_models import FAMILIES, Batch, one_thread, tiny, tiny_lora
from torchtune_packing import attention, attention_choice
from torchtune_packing.attention import InstalledAttention, install_attention
from torchtune_packing.attention_kernels import WindowedBlockMasks
from torchtune_packing.attention_layers import PackedAttention
from torchtune_packing.layout import DocumentLayout

CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
BATCH = Batch([[9, 1, 20], [30, 5]], 36)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def mask_of(attn: InstalledAttention, batch: Batch = BATCH) -> Any:
    return attn.prepare(batch.seq_lens, batch.s)


# What is chosen


def test_auto_takes_varlen_on_the_cpu_and_says_so_in_one_line() -> None:
    attn = install_attention(tiny("llama3"), **CPU)
    assert attn.backend == "varlen"
    assert "varlen on cpu in torch.float32" in attn.reason and "\n" not in attn.reason
    assert attn.describe_layers() == {"layers.0.attn": "varlen", "layers.1.attn": "varlen"}


def test_auto_gives_gemma2_and_attention_dropout_to_sdpa_and_says_why() -> None:
    attn = install_attention(tiny("gemma2"), **CPU)
    assert attn.backend == "sdpa"
    assert "not varlen: it cannot do the soft-capped, sliding-window" in attn.reason
    attn = install_attention(tiny("llama3", attn_dropout=0.1), **CPU)
    assert attn.backend == "sdpa"
    assert "not varlen: it has no attention dropout, and attn_dropout is 0.1" in attn.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_B32_the_choice_follows_the_device_that_is_named(dtype, monkeypatch) -> None:
    """A GPU in the machine changes nothing for a model on the CPU, and is not asked about."""

    def asked(*_: object) -> bool:
        raise AssertionError("asked for CUDA although the model runs on the CPU")

    for name in ("is_available", "get_device_capability", "current_device", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, asked)
    attn = install_attention(tiny("llama3"), device="cpu", dtype=dtype)
    assert attn.backend == "varlen"
    model = tiny("llama3").to(dtype)
    attn = install_attention(model, device="cpu", dtype=dtype)
    BATCH.run(model, mask_of(attn))
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_masks_are_of_the_backends_kind() -> None:
    assert isinstance(mask_of(install_attention(tiny("llama3"), "varlen", **CPU)), DocumentLayout)
    mask = mask_of(install_attention(tiny("llama3"), "sdpa", **CPU))
    assert torch.equal(mask, BATCH.mask)


def test_slots_and_the_longest_length_grow_in_powers_of_two_and_never_shrink() -> None:
    attn = install_attention(tiny("llama3"), "varlen", **CPU)
    seen = []
    for row in ([40], [700, 68], [1] * 33 + [7], [3, 3]):
        layout = attn.prepare(torch.tensor([row]), sum(row))
        seen.append((layout.cu_seqlens.numel() - 1, layout.max_seqlen))
    assert seen == [(32, 512), (32, 1024), (64, 1024), (64, 1024)]


# A CUDA device is named although there is none: facts about it and the trial are given.


@pytest.fixture
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU of which the test says what it can do, and kernels whose trial succeeds."""
    gpu: dict[str, Any] = {"capability": (9, 0), "importable": {"flash_attn", "varlen"}}

    def load(backend: str) -> object:
        if backend not in gpu["importable"]:
            raise ImportError(f"No module named {backend!r}")
        return object()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpu["capability"])
    monkeypatch.setattr(attention_choice, "_fused_varlen", load)
    monkeypatch.setattr(attention, "trial_failure", lambda *_, **__: None)
    return gpu


@pytest.mark.parametrize(
    ("dtype", "capability", "importable", "expected", "because"),
    [
        (torch.bfloat16, (9, 0), {"flash_attn", "varlen"}, "flash_attn", ""),
        (torch.bfloat16, (9, 0), {"varlen"}, "varlen", "not flash_attn: it cannot be imported"),
        (torch.float16, (8, 0), set(), "flex", "not varlen: it cannot be imported"),
        (torch.float32, (9, 0), {"flash_attn", "varlen"}, "flex", "bfloat16 or float16"),
        (torch.bfloat16, (7, 5), {"flash_attn", "varlen"}, "flex", "compute capability 8.0"),
        (torch.bfloat16, (7, 0), {"flash_attn", "varlen"}, "sdpa", "compute capability 7.5"),
        (torch.float64, (9, 0), {"flash_attn", "varlen"}, "sdpa", "do not compute in float64"),
    ],
)
def test_auto_on_cuda(dtype, capability, importable, expected, because, pretended_cuda) -> None:
    pretended_cuda.update(capability=capability, importable=importable)
    attn = install_attention(tiny("llama3"), device="cuda", dtype=dtype)
    assert attn.backend == expected
    assert because in attn.reason


def test_flash_attn_that_is_missing_is_named_when_asked_for(pretended_cuda) -> None:
    pretended_cuda["importable"] = set()
    with pytest.raises(ValueError, match="flash_attn cannot serve.*No module named 'flash_attn'"):
        install_attention(tiny("llama3"), "flash_attn", device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "flash_attn"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_on_cuda_is_served_or_refused(family, lora, backend, pretended_cuda) -> None:
    """Served here means chosen; that the kernels are exact is for the tests of the kernels."""
    model = tiny_lora(family) if lora else tiny(family)
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    narrow = model.layers[0].attn.head_dim % 8 != 0
    if family == "gemma2" and backend in ("varlen", "flash_attn"):
        with pytest.raises(ValueError, match="soft-capped, sliding-window attention of Gemma2"):
            install_attention(model, backend, **bf16)
    elif narrow and backend in ("varlen", "flash_attn"):
        with pytest.raises(ValueError, match="head_dim is 12"):
            install_attention(model, backend, **bf16)
    else:
        assert install_attention(model, backend, **bf16).backend == backend


# What is refused


def test_an_unknown_backend_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'flash'; choose one of auto, sdpa, flex, varlen, flash_"):
        install_attention(tiny("llama3"), "flash", **CPU)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("flash_attn", "it needs a CUDA device, and the model runs on cpu"),
        ("flex", "FlexAttention has no backward on the CPU"),
    ],
)
def test_what_the_cpu_cannot_do_is_refused_before_training(backend, reason) -> None:
    with pytest.raises(ValueError, match=f"{reason}; set it to auto, or to sdpa.*packed=False"):
        install_attention(tiny("llama3"), backend, **CPU)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_B44_attention_dropout_is_refused_where_kernels_have_none(backend) -> None:
    model = tiny("llama3", attn_dropout=0.1)
    with pytest.raises(ValueError, match="MultiHeadAttention: .*attn_dropout is 0.1.*packed=False"):
        install_attention(model, backend, forward_only=True, **CPU)


class LinearAttention(nn.Module):
    """Attention of a kind that nobody here knows."""

    is_causal, attn_dropout, head_dim = True, 0.0, 8

    def forward(self, x, y=None, *, mask=None, input_pos=None):
        return x


class OwnForward(MultiHeadAttention):
    """A subclass that does as it likes with the mask."""

    def forward(self, x, y=None, *, mask=None, input_pos=None):
        return super().forward(x, y, mask=None, input_pos=input_pos)


class OwnLayer(TransformerSelfAttentionLayer):
    """A layer that forgets the mask."""

    def forward(self, x, *, mask=None, input_pos=None, **kwargs):
        return super().forward(x, input_pos=input_pos)


class OwnDecoder(TransformerDecoder):
    """A decoder that forgets the mask."""

    def forward(self, tokens, **kwargs):
        return super().forward(tokens)


def replaced(kind: str) -> nn.Module:
    model = tiny("llama3")
    layer = model.layers[1]
    if kind == "LinearAttention":
        layer.attn = LinearAttention()
    elif kind == "OwnForward":
        layer.attn.__class__ = OwnForward
    elif kind == "OwnLayer":
        layer.__class__ = OwnLayer
    elif kind == "OwnDecoder":
        model.__class__ = OwnDecoder
    elif kind == "FusionLayer":
        cross = copy.deepcopy(layer.attn)
        cross.pos_embeddings = None
        model.layers[1] = FusionLayer(layer, TransformerCrossAttentionLayer(cross, nn.Identity()))
    elif kind == "ModuleLayerDropoutWrapper":
        prepare_layer_dropout(model.layers, prob_max=0.5)
    elif kind == "not causal":
        layer.attn.is_causal = False
    elif kind == "Linear":
        return nn.Linear(2, 2)
    return model


@pytest.mark.parametrize(
    "kind",
    [
        "LinearAttention",
        "OwnForward",
        "OwnLayer",
        "OwnDecoder",
        "FusionLayer",
        "ModuleLayerDropoutWrapper",
        "not causal",
        "Linear",
    ],
)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_B44_what_is_not_known_to_keep_documents_apart_is_refused(kind, backend) -> None:
    with pytest.raises(ValueError, match=rf"{kind}.*packed=False"):
        install_attention(replaced(kind), backend, **CPU)


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_B11_a_packed_model_without_its_mask_is_an_error(backend) -> None:
    model = tiny("gemma2" if backend == "sdpa" else "llama3")
    install_attention(model, backend, **CPU)
    with pytest.raises(ValueError, match="mask=None.*seq_lens"):
        model(BATCH.tokens, input_pos=BATCH.input_pos)


def test_B11_is_causal_is_off_whenever_a_mask_is_given(monkeypatch) -> None:
    """Under every mask that reaches torch's SDPA, ``is_causal`` with a mask would win over it."""
    seen = []
    original = nn.functional.scaled_dot_product_attention

    def spy(*args: Any, is_causal: bool = False, **kwargs: Any) -> torch.Tensor:
        seen.append((is_causal, kwargs.get("attn_mask") is not None))
        return original(*args, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    model = tiny("llama3")
    attn = install_attention(model, "sdpa", **CPU)
    model(BATCH.tokens, input_pos=BATCH.input_pos, mask=mask_of(attn))
    assert seen == [(False, True)] * 2


def test_a_mask_of_another_backend_is_refused() -> None:
    model = tiny("llama3")
    layout = mask_of(install_attention(model, "varlen", **CPU))
    install_attention(model, "sdpa", **CPU)
    with pytest.raises(ValueError, match="'sdpa'.*cannot take a mask of type DocumentLayout"):
        model(BATCH.tokens, input_pos=BATCH.input_pos, mask=layout)


def test_B36_a_mask_of_another_batch_is_refused() -> None:
    """The smaller last batch of an epoch gets its own mask, and only that one fits."""
    model = tiny("llama3")
    tokens, input_pos = BATCH.tokens[:1], BATCH.input_pos[:1]
    for backend in ("varlen", "sdpa"):
        attn = install_attention(model, backend, **CPU)
        with pytest.raises(ValueError, match="2 rows"):
            model(tokens, input_pos=input_pos, mask=mask_of(attn))
        own = attn.prepare(BATCH.seq_lens[:1], BATCH.s)
        assert model(tokens, input_pos=input_pos, mask=own).shape == (1, 36, 64)
        one_row_for_two = attn.prepare(BATCH.seq_lens[:1], BATCH.s)
        with pytest.raises(ValueError, match="1 rows"):
            model(BATCH.tokens, input_pos=BATCH.input_pos, mask=one_row_for_two)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_B36_a_mask_of_another_width_is_refused(backend: str, monkeypatch) -> None:
    """As many rows and another s: what a layout of a longer or shorter batch would look like."""
    monkeypatch.setattr(attention, "trial_failure", lambda *_, **__: None)
    model = tiny("llama3")
    attn = install_attention(model, backend, forward_only=True, **CPU)
    for s in (35, 37):
        mask = attn.prepare(torch.tensor([[9, s - 9], [s, 0]], dtype=torch.int32), s)
        with pytest.raises(ValueError, match=f"2 rows of {s} positions.*2 rows of 36"):
            model(BATCH.tokens, input_pos=BATCH.input_pos, mask=mask)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
@pytest.mark.parametrize("keys", ["none", "of another tensor"])
def test_keys_that_are_not_the_queries_own_are_refused(keys: str, backend: str, monkeypatch):
    """A layout says which queries and keys are of one document, if both are the same tokens."""
    monkeypatch.setattr(attention, "trial_failure", lambda *_, **__: None)
    model = tiny("llama3")
    attn = install_attention(model, backend, forward_only=True, **CPU)
    mask = mask_of(attn)
    x = torch.randn(2, BATCH.s, 32)
    y = None if keys == "none" else torch.randn(2, BATCH.s, 32)
    with pytest.raises(ValueError, match=f"{type(mask).__name__} serves self-attention"):
        model.layers[0].attn(x, y, mask=mask, input_pos=BATCH.input_pos)


# What stays as it was


def test_weights_names_and_hooks_stay() -> None:
    model = tiny_lora("llama3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls: list[str] = []
    model.layers[0].attn.register_forward_hook(lambda *_: calls.append("hook"))
    attn = install_attention(model, "varlen", **CPU)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert isinstance(model.layers[0].attn, MultiHeadAttention)
    model(BATCH.tokens, input_pos=BATCH.input_pos, mask=mask_of(attn))
    assert calls == ["hook"]


def test_a_bool_mask_is_honoured_under_every_backend_and_recorded() -> None:
    model = tiny("llama3").eval()
    expected = model(BATCH.tokens, input_pos=BATCH.input_pos, mask=BATCH.mask)
    attn = install_attention(model, "varlen", **CPU)
    assert torch.equal(model(BATCH.tokens, input_pos=BATCH.input_pos, mask=BATCH.mask), expected)
    assert set(attn.describe_layers().values()) == {"sdpa"}


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_generation_gives_the_same_tokens_with_and_without_a_cache(backend) -> None:
    model = tiny("llama3").eval()
    prompt = torch.randint(0, 64, (2, 7))
    expected, _ = generation.generate(model, prompt, max_generated_tokens=6, top_k=1)
    install_attention(model, backend, **CPU)
    tokens, _ = generation.generate(model, prompt, max_generated_tokens=6, top_k=1)
    assert torch.equal(tokens, expected)
    model.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=16)
    tokens, _ = generation.generate(model, prompt, max_generated_tokens=6, top_k=1)
    assert torch.equal(tokens, expected)


class ScaleOfEachHead(nn.Module):
    """A norm's place holder that tells heads from positions: input ``[b, h, s, head_dim]``."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.arange(heads).view(heads, 1, 1) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_norms_of_queries_and_keys_come_where_torchtune_has_them(backend) -> None:
    """No family of torchtune 0.6.1 has them, but its attention takes them."""
    model = tiny("llama3")
    for layer in model.layers:
        layer.attn.q_norm = ScaleOfEachHead(layer.attn.num_heads)
        layer.attn.k_norm = ScaleOfEachHead(layer.attn.num_kv_heads)
    expected = BATCH.alone(model)
    attn = install_attention(model, backend, **CPU)
    BATCH.run(model, attn.prepare(BATCH.seq_lens, BATCH.s)).assert_equals(
        expected, logits=1e-4, loss=1e-5, grads=1e-4
    )
    assert set(attn.describe_layers().values()) == {backend}


def test_a_copy_works_on_its_own_and_a_second_installation_changes_the_backend() -> None:
    model = tiny("llama3")
    attn = install_attention(model, "varlen", **CPU)
    twin = copy.deepcopy(model)
    install_attention(model, "sdpa", **CPU)
    logits = twin(BATCH.tokens, input_pos=BATCH.input_pos, mask=mask_of(attn))
    assert type(model.layers[0].attn) is PackedAttention
    expected = model(BATCH.tokens, input_pos=BATCH.input_pos, mask=BATCH.mask)
    torch.testing.assert_close(logits, expected)


def test_a_layout_survives_pickling() -> None:
    layout = mask_of(install_attention(tiny("llama3"), "varlen", **CPU))
    again = pickle.loads(pickle.dumps(layout))
    assert torch.equal(again.spans, layout.spans) and again.batch_size == layout.batch_size


def test_a_subclass_that_keeps_the_forward_is_known_and_keeps_its_own_methods() -> None:
    class Sharded(MultiHeadAttention):
        def unshard(self) -> str:
            return "unsharded"

    model = tiny("llama3")
    for layer in model.layers:
        layer.attn.__class__ = Sharded
    attn = install_attention(model, "varlen", **CPU)
    BATCH.run(model, mask_of(attn))
    assert model.layers[0].attn.unshard() == "unsharded"


@pytest.mark.parametrize("wrapped_first", [True, False], ids=["wrapped first", "installed first"])
def test_layers_are_found_inside_checkpoint_wrappers_and_compiled_models(wrapped_first) -> None:
    model = tiny("llama3")
    expected = BATCH.run(copy.deepcopy(model), BATCH.mask)

    def wrap() -> None:
        training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})

    if wrapped_first:
        wrap()
    attn = install_attention(torch.compile(model, backend="eager"), "varlen", **CPU)
    if not wrapped_first:
        wrap()
    assert list(attn.describe_layers()) == ["layers.0.attn", "layers.1.attn"]
    result = BATCH.run(model, mask_of(attn))
    result.grads = {
        name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in result.grads.items()
    }
    result.assert_equals(expected, logits=1e-5, loss=1e-6, grads=1e-5)


# FlexAttention's masks (its kernel is tested on its own)


def test_flex_masks_are_blockmasks_one_per_window(monkeypatch) -> None:
    monkeypatch.setattr(attention, "trial_failure", lambda *_, **__: None)
    attn = install_attention(tiny("llama3"), "flex", forward_only=True, **CPU)
    assert isinstance(mask_of(attn), BlockMask)
    attn = install_attention(tiny("gemma2"), "flex", forward_only=True, **CPU)
    masks = mask_of(attn)
    assert isinstance(masks, WindowedBlockMasks)
    assert set(masks.by_window) == {None, 10}
    assert (masks.batch_size, masks.seq_len) == (2, 36)


def test_B41_a_dense_mask_above_the_limit_is_refused_by_its_size() -> None:
    attn = install_attention(tiny("llama3"), "sdpa", **CPU)
    seq_lens = torch.full((4, 1), 32_768, dtype=torch.int32)
    with pytest.raises(ValueError, match="4 rows of 32,768 positions takes 4,294,967,296 bytes"):
        attn.prepare(seq_lens, 32_768)
