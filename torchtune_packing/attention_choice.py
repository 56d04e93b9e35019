"""Which attention backend a model gets: what it holds, what stands in the way, what was tried.

The choice follows from the layers themselves (class, soft cap, sliding window, dropout, head size)
and from the device and dtype that the caller names; a list of model families would be out of date
with the next one. Three steps, all at set-up:

1. ``attention_layers`` finds every attention layer, and refuses a model with a part that may
   not keep packed documents apart.
2. ``obstacle`` says why a backend cannot serve these layers, from facts alone.
3. ``trial_failure`` runs the kernel once, forward and backward, on a small packed batch with
   the model's heads, and compares it with dense attention. Compiled kernels fail at their first
   call and not before, and a wrong result is worse than a failure.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer

from torchtune_packing.attention_kernels import (
    CpuVarlen,
    FlashAttn,
    Flex,
    TorchVarlen,
    allowed_pairs,
    dense_attention,
)
from torchtune_packing.attention_layers import Kernel, attention_name, is_known_attention

__all__ = [
    "BACKENDS",
    "attention_layers",
    "check_backend",
    "kernels",
    "obstacle",
    "trial_failure",
]

#: What ``attention_backend`` may be.
BACKENDS = ("auto", "sdpa", "flex", "varlen", "flash_attn")

#: What is left for a model or a layer that is refused.
_UNPACKED = "train unpacked (packed=False in torchtune's recipes)"

#: Largest relative error (Frobenius norm) of a trial against dense attention in float32. Rounding
#: stays far below; a document that sees another one lies far above.
_TRIAL_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 0.01}
_TRIAL_SEQ_LENS = [[70, 1, 57, 100, 28]]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the attention layers of a model.

    Args:
        model: a torchtune ``TransformerDecoder``, plain, checkpointed, compiled or sharded.

    Returns:
        Name -> attention layer, in the order in which they run.

    Raises:
        ValueError: When the model, a layer or its attention is of a kind that is not known to pass
            the mask on and to honour it.
    """
    model = _unwrapped(model)
    name = type(model).__name__
    unknown = "which is not known to keep packed documents apart"
    if type(model).forward is not TransformerDecoder.forward:
        raise ValueError(f"the model is a {name}, {unknown}; {_UNPACKED}")
    found: dict[str, nn.Module] = {}
    for index, wrapped in enumerate(model.layers):  # type: ignore[arg-type]
        layer = _unwrapped(wrapped)
        if type(layer).forward is not TransformerSelfAttentionLayer.forward:
            raise ValueError(
                f"layer {index} of {name} is a {type(layer).__name__}, {unknown}; {_UNPACKED}"
            )
        attention: Any = _unwrapped(layer.attn)  # type: ignore[arg-type]
        if not is_known_attention(attention):
            raise ValueError(
                f"the attention of layer {index} of {name} is a {type(attention).__name__}, "
                f"{unknown}; {_UNPACKED}"
            )
        if not attention.is_causal:
            raise ValueError(
                f"the attention of layer {index} of {name} is not causal, and packed documents are "
                f"kept apart by a causal mask; {_UNPACKED}"
            )
        found[f"layers.{index}.attn"] = attention
    if not found:
        raise ValueError(f"{name} has no layers to prepare for packed batches")
    return found


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, CheckpointWrapper):
            module = module._checkpoint_wrapped_module
        elif isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        else:
            return module


def obstacle(
    backend: str,
    layers: dict[str, nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype,
    forward_only: bool,
) -> str | None:
    """Why a backend cannot serve these layers, as far as can be known without running it.

    Args:
        backend: "sdpa", "flex", "varlen" or "flash_attn".
        layers: the model's attention layers.
        device: where the model runs.
        dtype: what it computes in.
        forward_only: whether no gradient will be asked for.

    Returns:
        The reason, or None when nothing is in the way.
    """
    if backend == "sdpa":
        return None
    # Under FSDP and on the meta device the layers are real; only their weights are elsewhere.
    all_layers: list[Any] = list(layers.values())
    dropout = max(layer.attn_dropout for layer in all_layers)
    if dropout > 0:
        return f"it has no attention dropout, and attn_dropout is {dropout}"
    if backend == "flex":
        return _flex_obstacle(device, dtype, forward_only)
    if any(isinstance(layer, Gemma2Attention) for layer in all_layers):
        return "it cannot do the soft-capped, sliding-window attention of Gemma2Attention"
    if backend == "varlen" and device.type == "cpu":
        return None
    return _fused_varlen_obstacle(backend, device, dtype, max(x.head_dim for x in all_layers))


def check_backend(
    backend: str,
    layers: dict[str, nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype,
    forward_only: bool = False,
) -> None:
    """Refuses a backend that was asked for by name and cannot serve these layers.

    Args:
        backend: one of ``BACKENDS``; "auto" always finds one.
        layers: the model's attention layers; they may be on the meta device.
        device: where the model runs.
        dtype: what it computes in.
        forward_only: whether no gradient will be asked for.

    Raises:
        ValueError: the name is unknown, or something stands in the way.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention_backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return
    why_not = obstacle(backend, layers, device=device, dtype=dtype, forward_only=forward_only)
    if why_not is not None:
        name = attention_name(next(iter(layers.values())))
        raise ValueError(
            f"attention_backend={backend} cannot serve this model's {name}: {why_not}; set it to "
            f"auto, or to sdpa, which takes any mask, or {_UNPACKED}"
        )


def _flex_obstacle(device: torch.device, dtype: torch.dtype, forward_only: bool) -> str | None:
    if device.type == "cpu":
        return None if forward_only else "FlexAttention has no backward on the CPU"
    if device.type != "cuda":
        return f"it was never tried on {device.type}"
    if dtype == torch.float64:
        return "its CUDA kernels do not compute in float64"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "it needs a GPU of compute capability 7.5 or later"
    return None


def _fused_varlen_obstacle(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and the model runs on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, and the model in {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"it needs a head_dim that is a multiple of 8 up to 256, and head_dim is {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    try:
        _fused_varlen(backend)
    except Exception as error:  # a broken binary raises anything from ImportError to OSError
        return f"it cannot be imported ({type(error).__name__}: {error})"
    return None


def _fused_varlen(backend: str) -> Kernel:
    if backend == "flash_attn":
        return FlashAttn(importlib.import_module("flash_attn").flash_attn_varlen_func)
    return TorchVarlen(importlib.import_module("torch.nn.attention.varlen").varlen_attn)


def kernels(backend: str, device: torch.device) -> list[Kernel]:
    """The kernels of a backend in the order in which they are tried; none for sdpa.

    FlexAttention comes twice: its second form has small tiles, for GPUs whose shared memory is too
    small for torch's choice.
    """
    if backend == "sdpa":
        return []
    if backend == "flex":
        if device.type == "cpu":
            return [Flex()]
        small = {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1}
        small |= {"BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 16}
        return [Flex(), Flex(small)]
    if backend == "varlen" and device.type == "cpu":
        return [CpuVarlen()]
    return [_fused_varlen(backend)]


def trial_failure(
    kernel: Kernel,
    layers: dict[str, nn.Module],
    make_mask: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    forward_only: bool,
) -> str | None:
    """Runs a kernel once per kind of layer and compares it with dense attention.

    Args:
        kernel: what to try.
        layers: the model's attention layers.
        make_mask: ``make_mask(seq_lens, s)``, the mask that the kernel takes.
        device: where the model runs.
        dtype: what it computes in.
        forward_only: whether to leave the backward out.

    Returns:
        What went wrong, or None.
    """
    seq_lens = torch.tensor(_TRIAL_SEQ_LENS, dtype=torch.int32)
    s = sum(_TRIAL_SEQ_LENS[0])
    kinds: dict[tuple[object, ...], Any] = {}
    for layer in layers.values():
        marks = ("num_heads", "num_kv_heads", "head_dim", "softcapping", "sliding_window_size")
        kinds.setdefault(tuple(getattr(layer, mark, None) for mark in marks), layer)
    try:
        mask = make_mask(seq_lens, s)
        for layer in kinds.values():
            error = _trial_error(kernel, layer, mask, s, device, dtype, forward_only)
            if not error <= _TRIAL_TOLERANCE.get(dtype, 0.01):
                return f"its result is wrong for head_dim {layer.head_dim}: relative error {error}"
    except Exception as error:  # whatever a compiler or a driver raises
        head_dims = sorted({layer.head_dim for layer in kinds.values()})
        line = str(error).strip().splitlines()[:1]
        return f"it failed for head_dim {head_dims} ({type(error).__name__}: {''.join(line)[:200]})"
    return None


def _trial_error(
    kernel: Kernel,
    layer: Any,
    mask: Any,
    s: int,
    device: torch.device,
    dtype: torch.dtype,
    forward_only: bool,
) -> float:
    """Largest relative error among the output and, with a backward, the three gradients."""
    generator = torch.Generator().manual_seed(0)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    inputs = [
        torch.randn(1, s, n, layer.head_dim, generator=generator).to(device, dtype) for n in heads
    ]
    results = []
    for run in (kernel, dense_attention):
        exact = run is dense_attention
        q, k, v = (x.float() if exact else x.clone() for x in inputs)
        with torch.set_grad_enabled(not forward_only):
            for x in (q, k, v):
                x.requires_grad_(not forward_only)
            out = run(layer, q, k, v, allowed_pairs(mask, layer, device) if exact else mask)
        grads = []
        if not forward_only:
            weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
            grads = list(torch.autograd.grad(out, (q, k, v), weights.to(out.dtype)))
        results.append([x.detach().double() for x in (out, *grads)])
    return max(
        float((ours - exact).norm() / exact.norm()) for ours, exact in zip(*results, strict=True)
    )
