"""SmolLM2 as torchtune models: full, LoRA, QLoRA and DoRA, in the three published sizes.

SmolLM2 is a Llama with tied embeddings and an unscaled rotary base of its own, so torchtune's
checkpointers read and write it as ``model_type: LLAMA3_2``. The sizes are those of the published
``config.json`` files; all three share the vocabulary of 49,152 and 8,192 positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torchtune.modules import (
    FeedForward,
    FrozenNF4Linear,
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.common_utils import reparametrize_as_dtype_state_dict_post_hook
from torchtune.modules.peft import DoRALinear, LoRALinear

VOCAB_SIZE = 49_152
MAX_SEQ_LEN = 8_192

#: The attention projections that LoRA can be applied to.
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj")

# torchao's default of 256 scalers a block does not divide the 576 x 576 weights of the 135M model
# (576 * 576 / 64 = 5,184 scalers); 64 divides the weights of all three sizes.
_NF4_SCALER_BLOCK_SIZE = 64

#: Builds one linear layer from its name, its input and its output width.
_Linear = Callable[[str, int, int], nn.Module]


@dataclass(frozen=True)
class _Size:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    intermediate_dim: int
    rope_base: int


_SIZE_135M = _Size(30, 9, 3, 576, 1_536, 100_000)
_SIZE_360M = _Size(32, 15, 5, 960, 2_560, 100_000)
_SIZE_1_7B = _Size(24, 32, 32, 2_048, 8_192, 130_000)


def smollm2_135m() -> TransformerDecoder:
    """Builds SmolLM2-135M (134.5 M parameters), the model of the quickstart."""
    return _decoder(_SIZE_135M, _plain_linear)


def smollm2_360m() -> TransformerDecoder:
    """Builds SmolLM2-360M (361.8 M parameters)."""
    return _decoder(_SIZE_360M, _plain_linear)


def smollm2_1_7b() -> TransformerDecoder:
    """Builds SmolLM2-1.7B (1,711 M parameters)."""
    return _decoder(_SIZE_1_7B, _plain_linear)


def lora_smollm2_135m(
    lora_attn_modules: list[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Builds SmolLM2-135M with LoRA adapters.

    Args:
        lora_attn_modules: attention projections that get an adapter, out of ``q_proj``, ``k_proj``,
            ``v_proj`` and ``output_proj``.
        apply_lora_to_mlp: whether the three MLP projections get one too.
        apply_lora_to_output: must be False, since the output layer is tied to the embeddings.
        lora_rank: rank of each adapter.
        lora_alpha: scale of the adapters; their output is multiplied by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability on the adapters' input.
        use_dora: whether to use DoRA (weight-decomposed LoRA) in place of LoRA.
        quantize_base: whether to hold the frozen projections in 4 bits (NF4), which makes it QLoRA.

    Raises:
        ValueError: if no layer or an unknown layer is named, or ``apply_lora_to_output`` is set.
    """
    return _lora_decoder(
        _SIZE_135M,
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        use_dora=use_dora,
        quantize_base=quantize_base,
    )


def lora_smollm2_360m(
    lora_attn_modules: list[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Builds SmolLM2-360M with LoRA adapters; arguments as for ``lora_smollm2_135m``."""
    return _lora_decoder(
        _SIZE_360M,
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        use_dora=use_dora,
        quantize_base=quantize_base,
    )


def lora_smollm2_1_7b(
    lora_attn_modules: list[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Builds SmolLM2-1.7B with LoRA adapters; arguments as for ``lora_smollm2_135m``."""
    return _lora_decoder(
        _SIZE_1_7B,
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        use_dora=use_dora,
        quantize_base=quantize_base,
    )


#: LoRA over a base held in 4 bits (NF4): the ``lora_`` builders with ``quantize_base=True``.
qlora_smollm2_135m = partial(lora_smollm2_135m, quantize_base=True)
qlora_smollm2_360m = partial(lora_smollm2_360m, quantize_base=True)
qlora_smollm2_1_7b = partial(lora_smollm2_1_7b, quantize_base=True)


def _plain_linear(name: str, in_dim: int, out_dim: int) -> nn.Module:
    return nn.Linear(in_dim, out_dim, bias=False)


def _lora_decoder(
    size: _Size,
    attn_modules: list[str],
    apply_lora_to_mlp: bool,
    apply_lora_to_output: bool,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    use_dora: bool,
    quantize_base: bool,
) -> TransformerDecoder:
    unknown = sorted(set(attn_modules) - set(ATTENTION_PROJECTIONS))
    if unknown:
        raise ValueError(
            f"lora_attn_modules names {unknown}, which SmolLM2 does not have; choose out of "
            f"{list(ATTENTION_PROJECTIONS)}."
        )
    if not attn_modules and not apply_lora_to_mlp:
        raise ValueError(
            "No layer gets an adapter: lora_attn_modules is empty and apply_lora_to_mlp is False; "
            f"name some of {list(ATTENTION_PROJECTIONS)} or set apply_lora_to_mlp."
        )
    if apply_lora_to_output:
        raise ValueError(
            "apply_lora_to_output is True, but SmolLM2's output layer is its embedding table (tied "
            "weights), which takes no adapter; set it to False."
        )
    adapted = set(attn_modules)
    if apply_lora_to_mlp:
        adapted |= {"gate_proj", "up_proj", "down_proj"}
    adapter = DoRALinear if use_dora else LoRALinear
    nf4 = {"scaler_block_size": _NF4_SCALER_BLOCK_SIZE} if quantize_base else {}

    def linear(name: str, in_dim: int, out_dim: int) -> nn.Module:
        if name in adapted:
            return adapter(
                in_dim,
                out_dim,
                rank=rank,
                alpha=alpha,
                dropout=dropout,
                quantize_base=quantize_base,
                **nf4,
            )
        if quantize_base:
            return FrozenNF4Linear(in_dim, out_dim, bias=False, **nf4)
        return _plain_linear(name, in_dim, out_dim)

    model = _decoder(size, linear)
    if quantize_base:
        # Checkpoints hold ordinary bf16 weights: each NF4 weight is restored as it is saved.
        model._register_state_dict_hook(
            partial(reparametrize_as_dtype_state_dict_post_hook, offload_to_cpu=True)
        )
    return model


def _decoder(size: _Size, linear: _Linear) -> TransformerDecoder:
    """Puts the decoder together out of linear layers that ``linear`` makes."""
    dim, hidden = size.embed_dim, size.intermediate_dim
    head_dim = dim // size.num_heads
    kv_dim = size.num_kv_heads * head_dim
    # One table of rotations for all layers.
    rope = RotaryPositionalEmbeddings(dim=head_dim, max_seq_len=MAX_SEQ_LEN, base=size.rope_base)
    layers = nn.ModuleList(
        TransformerSelfAttentionLayer(
            attn=MultiHeadAttention(
                embed_dim=dim,
                num_heads=size.num_heads,
                num_kv_heads=size.num_kv_heads,
                head_dim=head_dim,
                q_proj=linear("q_proj", dim, dim),
                k_proj=linear("k_proj", dim, kv_dim),
                v_proj=linear("v_proj", dim, kv_dim),
                output_proj=linear("output_proj", dim, dim),
                pos_embeddings=rope,
                max_seq_len=MAX_SEQ_LEN,
                attn_dropout=0.0,
            ),
            mlp=FeedForward(
                gate_proj=linear("gate_proj", dim, hidden),
                down_proj=linear("down_proj", hidden, dim),
                up_proj=linear("up_proj", dim, hidden),
            ),
            sa_norm=RMSNorm(dim=dim, eps=1e-5),
            mlp_norm=RMSNorm(dim=dim, eps=1e-5),
        )
        for _ in range(size.num_layers)
    )
    tok_embeddings = nn.Embedding(VOCAB_SIZE, dim)
    return TransformerDecoder(
        tok_embeddings=tok_embeddings,
        layers=layers,
        max_seq_len=MAX_SEQ_LEN,
        num_heads=size.num_heads,
        head_dim=head_dim,
        norm=RMSNorm(dim, eps=1e-5),
        output=TiedLinear(tok_embeddings),
    )
