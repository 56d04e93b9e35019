"""The kernels behind the backends, each called as ``kernel(layer, q, k, v, mask)``.

q is ``[b, s, h, head_dim]``, k and v are ``[b, s, kv heads, head_dim]`` with fewer heads under
grouped-query attention, and the result is like q. ``layer`` is asked for what is its own and never
for weights: soft cap, sliding window, scale.

=============  =======================  ======================================================
kernel         mask                     calls
=============  =======================  ======================================================
CpuVarlen      DocumentLayout           ``torchtune_packing.attention_cpu``
TorchVarlen    DocumentLayout           ``torch.nn.attention.varlen.varlen_attn`` (CUDA)
FlashAttn      DocumentLayout           ``flash_attn.flash_attn_varlen_func`` (CUDA)
Flex           BlockMask, or one per    ``flex_attention``, compiled at the first call
               sliding window
=============  =======================  ======================================================

Grouped heads go to the kernels as they are. Only ``varlen_attn`` of torch 2.10, which has no word
for them, gets copies.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtune_packing.attention_cpu import document_attention_cpu
from torchtune_packing.layout import DocumentLayout
from torchtune_packing.masks import block_causal_mask

__all__ = [
    "CpuVarlen",
    "FlashAttn",
    "Flex",
    "TorchVarlen",
    "WindowedBlockMasks",
    "allowed_pairs",
    "dense_attention",
]


class CpuVarlen:
    """One fused causal call per document, on the CPU."""

    def __call__(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentLayout
    ) -> torch.Tensor:
        """Attends within each document; known padding gets zeros."""
        return document_attention_cpu(q, k, v, mask.spans)


class TorchVarlen:
    """torch's own variable-length attention, in the signatures of torch 2.10 and of 2.11 on.

    Args:
        function: ``torch.nn.attention.varlen.varlen_attn``.

    Raises:
        ValueError: When the function has no argument that makes it causal.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        names = inspect.signature(function).parameters
        if "window_size" in names:
            self.causal: dict[str, Any] = {"window_size": (-1, 0)}
        elif "is_causal" in names:
            self.causal = {"is_causal": True}
        else:
            raise ValueError(
                "varlen_attn of this torch has neither window_size nor is_causal; "
                "use attention_backend=flex or sdpa"
            )
        self.function = function
        self.grouped_heads = "enable_gqa" in names

    def __call__(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentLayout
    ) -> torch.Tensor:
        """Attends within each document, all rows laid end to end."""
        options = dict(self.causal)
        group = q.shape[2] // k.shape[2]
        if group > 1 and self.grouped_heads:
            options["enable_gqa"] = True
        elif group > 1:
            k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        cu, longest = mask.cu_seqlens, mask.max_seqlen
        out: torch.Tensor = self.function(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu, cu, longest, longest, **options
        )
        return out.view_as(q)


class FlashAttn:
    """The optional ``flash-attn`` package.

    Args:
        function: ``flash_attn.flash_attn_varlen_func``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentLayout
    ) -> torch.Tensor:
        """Attends within each document, all rows laid end to end."""
        out: torch.Tensor = self.function(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            cu_seqlens_q=mask.cu_seqlens,
            cu_seqlens_k=mask.cu_seqlens,
            max_seqlen_q=mask.max_seqlen,
            max_seqlen_k=mask.max_seqlen,
            causal=True,
        )
        return out.view_as(q)


class WindowedBlockMasks:
    """One BlockMask per sliding window of a model; None stands for layers without a window.

    Attributes:
        by_window: window size in tokens, or None -> BlockMask.
        batch_size: b.
        seq_len: s.
    """

    def __init__(self, by_window: dict[int | None, BlockMask]) -> None:
        self.by_window = by_window
        some = next(iter(by_window.values()))
        self.batch_size: int = some.kv_num_blocks.shape[0]
        self.seq_len: int = some.seq_lengths[0]


#: Graphs that FlexAttention may be compiled to: one for each shape, with and without gradients,
#: with and without a sliding window.
_MOST_GRAPHS = 64


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # Compiled here and not at import, so that importing costs nothing and asks for no device.
    # fullgraph: past the limit torch raises; without it torch goes on unfused, holding all scores.
    options: dict[str, Any] = {"dynamic": False, "fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _MOST_GRAPHS
    compiled: Callable[..., Any] = torch.compile(flex_attention, **options)
    return compiled


def _soft_cap(cap: float) -> Callable[..., torch.Tensor]:
    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


class Flex:
    """FlexAttention, with Gemma 2's soft cap and sliding windows where a layer has them.

    Args:
        kernel_options: tile sizes for GPUs with little shared memory; None for torch's choice.
        compiled: False runs torch's unfused form, which holds all scores: for tests in float64.
    """

    def __init__(
        self, kernel_options: dict[str, Any] | None = None, *, compiled: bool = True
    ) -> None:
        self.kernel_options = kernel_options
        self.compiled = compiled

    def __call__(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: BlockMask | WindowedBlockMasks,
    ) -> torch.Tensor:
        """Attends where the BlockMask of the layer's window allows it."""
        cap = getattr(layer, "softcapping", None)
        if isinstance(mask, WindowedBlockMasks):
            mask = mask.by_window[getattr(layer, "sliding_window_size", None)]
        # Inside a compiled layer the compiler traces the function itself.
        traced = torch.compiler.is_compiling() or not self.compiled
        run: Any = flex_attention if traced else _compiled_flex()
        out: torch.Tensor = run(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if cap is None else _soft_cap(cap),
            block_mask=mask,
            scale=getattr(layer, "scaling", None),
            enable_gqa=q.shape[2] != k.shape[2],
            kernel_options=self.kernel_options,
        )
        return out.transpose(1, 2)


def allowed_pairs(
    mask: DocumentLayout | BlockMask | WindowedBlockMasks, layer: Any, device: torch.device
) -> torch.Tensor:
    """The dense form of a mask for one layer, its sliding window included: bool ``[b, s, s]``."""
    window = getattr(layer, "sliding_window_size", None)
    if isinstance(mask, DocumentLayout):
        allowed = block_causal_mask(mask.seq_lens.to(device), mask.seq_len)
    else:
        if isinstance(mask, WindowedBlockMasks):
            mask = mask.by_window[window]
        rows, s = mask.kv_num_blocks.shape[0], mask.seq_lengths[0]
        b, q, k = (torch.arange(n, device=device) for n in (rows, s, s))
        zero = torch.zeros((), dtype=torch.long, device=device)
        allowed = mask.mask_mod(b[:, None, None], zero, q[None, :, None], k[None, None, :])
    if window is not None:
        allowed = allowed & torch.ones_like(allowed).triu_(1 - window)
    return allowed


def dense_attention(
    layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Plain attention under a dense mask: what every kernel must equal, and what replaces it.

    Args:
        layer: the attention layer, for its soft cap and scale.
        q: float ``[b, s, h, head_dim]``.
        k: float ``[b, s, kv heads, head_dim]``.
        v: float ``[b, s, kv heads, head_dim]``.
        allowed: bool ``[b, s, s]``, True = may attend.

    Returns:
        float ``[b, s, h, head_dim]``.
    """
    group = q.shape[2] // k.shape[2]
    heads_q, heads_k, heads_v = (x.transpose(1, 2) for x in (q, k, v))
    heads_k = heads_k.repeat_interleave(group, dim=1)
    heads_v = heads_v.repeat_interleave(group, dim=1)
    allowed = allowed[:, None]
    cap, scale = getattr(layer, "softcapping", None), getattr(layer, "scaling", None)
    if cap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            heads_q, heads_k, heads_v, attn_mask=allowed, scale=scale
        )
    else:
        scores = (heads_q * layer.scaling) @ heads_k.transpose(-2, -1)
        scores = torch.tanh(scores / cap) * cap
        scores = scores.masked_fill(~allowed, float("-inf"))
        out = torch.softmax(scores.float(), dim=-1).type_as(q) @ heads_v
    return out.transpose(1, 2)
