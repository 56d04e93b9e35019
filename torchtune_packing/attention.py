"""Attention backends for packed batches: chosen once, installed into a torchtune model.

==========  ==============  =====================  =======================================
backend     runs on         mask for the layers    how documents are kept apart
==========  ==============  =====================  =======================================
sdpa        anything        bool ``[b, s, s]``     torch's SDPA with a dense mask
varlen      CPU             ``DocumentLayout``     one fused causal call per document
==========  ==============  =====================  =======================================

Use in a recipe::

    attn = install_attention(model, "auto", device=device, dtype=dtype)
    log.info(attn.reason)
    ...
    mask = attn.prepare(batch.pop("seq_lens"), tokens.shape[1])      # once per batch
    logits = model(tokens, input_pos=input_pos, mask=mask)           # all layers share it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer

from torchtune_packing.attention_cpu import document_attention_cpu
from torchtune_packing.attention_layers import Kernel, packed_class
from torchtune_packing.layout import DocumentLayout

__all__ = ["BACKENDS", "InstalledAttention", "install_attention"]

#: What ``backend`` may be.
BACKENDS = ("auto", "sdpa", "flex", "varlen", "flash_attn")

_OTHERWISE = (
    "use attention_backend=sdpa where that is possible, or train this model unpacked (packed=False)"
)


@dataclass
class InstalledAttention:
    """The backend that a model was prepared for, and the maker of its masks.

    Attributes:
        backend: the backend that runs: "sdpa", "flex", "varlen" or "flash_attn".
        reason: one line for the log: which backend, and why.
        device: where the masks are made.
    """

    backend: str
    reason: str
    device: torch.device
    _layers: dict[str, nn.Module] = field(repr=False)
    _num_slots: int = field(default=32, repr=False)

    def prepare(
        self, seq_lens: torch.Tensor, s: int, *, real_lengths: torch.Tensor | None = None
    ) -> Any:
        """Makes a batch's mask, once for all layers.

        Args:
            seq_lens: int32 ``[b, d]`` as the collate function returned it, on the CPU.
            s: positions in a row.
            real_lengths: int ``[b]``, real tokens per row, when known: ``varlen`` on the CPU then
                spends nothing on the padding tail and outputs zeros there.

        Returns:
            What the model takes as ``mask=``: a bool tensor ``[b, s, s]`` or a DocumentLayout.
        """
        if self.backend == "sdpa":
            from torchtune_packing.masks import block_causal_mask

            return block_causal_mask(seq_lens.to(self.device, non_blocking=True), s)
        # Slots grow in powers of two, so that compiled code meets a handful of shapes at most.
        while self._num_slots < seq_lens.shape[1]:
            self._num_slots *= 2
        return DocumentLayout.from_seq_lens(
            seq_lens, s, device=self.device, real_lengths=real_lengths, num_slots=self._num_slots
        )

    def describe_layers(self) -> dict[str, str]:
        """Which backend each attention layer was given: name of the layer -> backend."""
        return {name: layer.packed_backend for name, layer in self._layers.items()}  # type: ignore[misc]


def _cpu_varlen(
    layer: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
) -> torch.Tensor:
    return document_attention_cpu(q, k, v, mask.spans)


def _attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All attention layers by name; raises ValueError for a model that cannot be understood."""
    name = type(model).__name__
    if not isinstance(model, TransformerDecoder):
        raise ValueError(
            f"{name} is not a torchtune TransformerDecoder, so its attention to packed documents "
            f"cannot be vouched for; {_OTHERWISE}"
        )
    found: dict[str, nn.Module] = {}
    for index, layer in enumerate(model.layers):
        blocks = [
            (path, m)
            for path, m in layer.named_modules()
            if type(m).forward is TransformerSelfAttentionLayer.forward
        ]
        if len(blocks) != 1:
            raise ValueError(
                f"layer {index} of {name} is a {type(layer).__name__}, which is not known to keep "
                f"packed documents apart; {_OTHERWISE}"
            )
        path, block = blocks[0]
        attn = block.attn
        if packed_class(attn) is None or not attn.is_causal:
            raise ValueError(
                f"the attention of layer {index} of {name} is a {type(attn).__name__}, which is "
                f"not known to keep packed documents apart; {_OTHERWISE}"
            )
        found[".".join(filter(None, ["layers", str(index), path, "attn"]))] = attn
    return found


def _varlen_obstacle(layers: dict[str, nn.Module]) -> str | None:
    """Why ``varlen`` cannot serve these layers, None when it can."""
    for layer in layers.values():
        if isinstance(layer, Gemma2Attention):
            return "varlen cannot do Gemma 2's soft-capped, sliding-window attention"
        if layer.attn_dropout:
            return f"varlen cannot do attention dropout (attn_dropout={layer.attn_dropout})"
    return None


def install_attention(
    model: nn.Module,
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> InstalledAttention:
    """Prepares a torchtune model for packed batches and chooses how its attention runs.

    Every attention layer of the model changes its class (see
    :mod:`torchtune_packing.attention_layers`); weights and names stay. From then on a call without
    a mask is an error, never plain causal attention across documents.

    Args:
        model: a torchtune ``TransformerDecoder``, before or after activation checkpointing,
            compiling or sharding was applied.
        backend: one of :data:`BACKENDS`. "auto" takes the fastest that is exact for this model.
        device: where the model runs.
        dtype: what the model computes in.

    Returns:
        The backend, the reason for it, and ``prepare`` for each batch's mask.

    Raises:
        ValueError: When the backend is unknown, or the model or one of its layers cannot keep
            documents apart under it.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"attention_backend is {backend!r}; it must be one of {', '.join(BACKENDS)}"
        )
    device = torch.device(device)
    layers = _attention_layers(model)
    obstacle = _varlen_obstacle(layers)
    if backend == "auto":
        if obstacle is None and device.type == "cpu":
            chosen, why = "varlen", "one fused causal call per document, exact on the CPU"
        else:
            chosen, why = "sdpa", obstacle or f"a dense mask works on {device.type}"
    elif backend in ("sdpa", "varlen"):
        if backend == "varlen" and obstacle is not None:
            raise ValueError(f"attention_backend=varlen: {obstacle}; {_OTHERWISE}")
        chosen, why = backend, "as asked for"
    else:
        raise ValueError(f"attention_backend={backend} is not available yet on {device.type}")
    kernels: dict[str, tuple[Kernel | None, type]] = {
        "sdpa": (None, torch.Tensor),
        "varlen": (_cpu_varlen, DocumentLayout),
    }
    for layer in layers.values():
        _install(layer, chosen, *kernels[chosen])
    reason = f"attention backend {chosen} on {device.type} ({dtype}): {why}"
    return InstalledAttention(chosen, reason, device, layers)


def _install(layer: Any, backend: str, kernel: Callable[..., Any] | None, mask_type: type) -> None:
    new_class = packed_class(layer)
    assert new_class is not None
    layer.__class__ = new_class
    layer.packed_backend = backend
    layer.packed_kernel = kernel
    layer.packed_mask_type = mask_type
