"""torchtune's attention layers, able to take a document layout or a BlockMask.

``install_attention`` gives each attention layer of a model one of
these classes instead of its own. Parameters, buffers, hooks and state-dict keys stay; only
``forward`` changes, and that only for masks that torchtune's own forward cannot use: with a bool
mask, and with a KV cache, the layer still runs torchtune's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import MultiHeadAttention

from torchtune_packing.rotary import rotate_q_and_k

__all__ = [
    "Kernel",
    "PackedAttention",
    "PackedGemma2Attention",
    "PackedLayer",
    "attention_name",
    "is_known_attention",
    "pack_layer",
]

#: ``kernel(layer, q, k, v, mask)``: q ``[b, s, h, head_dim]``, k and v ``[b, s, kv heads,
#: head_dim]``, output like q.
Kernel = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


class PackedLayer(nn.Module):
    """What packing adds to an attention layer: a kernel for its own kind of mask, and refusals.

    Attributes:
        packed_backend: name of the backend that was installed.
        packed_mask_types: classes of the masks that ``packed_kernel`` takes, besides bool tensors.
        packed_kernel: what computes attention under such a mask; None when there is none.
        packed_ran: what the last forward ran: the backend, or "sdpa" under a bool mask.
    """

    packed_backend: str
    packed_mask_types: tuple[type, ...]
    packed_kernel: Kernel | None
    packed_ran: str | None

    # What torchtune's classes have, and this one reads.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_enabled: bool
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    output_proj: nn.Module
    pos_embeddings: nn.Module | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        *,
        mask: Any = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention within each document.

        Args:
            x: float ``[b, s, embed_dim]``.
            y: the same tensor as x, except where torchtune's own forward allows another.
            mask: bool ``[b, s, s]``, or what the installed backend's ``prepare`` returned.
            input_pos: int ``[b, s]``, positions within the documents.

        Returns:
            float ``[b, s, embed_dim]``.

        Raises:
            ValueError: When there is no mask, or it is of another backend or of another batch.
        """
        if not self._takes(x, y, mask):
            self.packed_ran = "sdpa"
            own: torch.Tensor = super().forward(x, y, mask=mask, input_pos=input_pos)
            return own
        # The steps and their order are torchtune's, with one difference that changes no value:
        # heads stay in dimension 2, where the kernels want them.
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        if self.pos_embeddings is not None:
            q, k = rotate_q_and_k(self.pos_embeddings, q, k, input_pos)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.transpose(1, 2)).transpose(1, 2)
            k = self.k_norm(k.transpose(1, 2)).transpose(1, 2)
        assert self.packed_kernel is not None
        self.packed_ran = self.packed_backend
        attended = self.packed_kernel(self, q, k, v, mask)
        projected: torch.Tensor = self.output_proj(attended.reshape(b, s, -1))
        return projected

    def _takes(self, x: torch.Tensor, y: torch.Tensor | None, mask: Any) -> bool:
        """True when the installed kernel is to run, False when torchtune's own code is."""
        if mask is None:  # with a KV cache too, where torchtune's decoder asks for one itself
            raise ValueError(
                "this model was prepared for packed batches and was called with mask=None, which "
                "would let documents attend to each other; pass mask=attn.prepare(seq_lens, s) "
                "with the batch's seq_lens (or a bool mask [b, s, s])"
            )
        if isinstance(mask, torch.Tensor):
            if mask.dim() != 3 or mask.dtype != torch.bool:
                raise ValueError(
                    f"the mask is a {mask.dtype} tensor of {mask.dim()} dimensions, which says "
                    "nothing about documents; pass mask=attn.prepare(seq_lens, s) with the batch's "
                    "seq_lens (or a bool mask [b, s, s])"
                )
            if self.training and mask.shape[0] != x.shape[0]:
                raise ValueError(
                    f"the mask has {mask.shape[0]} rows and the batch has {x.shape[0]}; make one "
                    "mask per batch with attn.prepare(seq_lens, s)"
                )
            return False
        if self.packed_kernel is None or not isinstance(mask, self.packed_mask_types):
            raise ValueError(
                f"the attention backend is {self.packed_backend!r}, and it cannot take a mask of "
                f"type {type(mask).__name__}; make the mask with attn.prepare(seq_lens, s)"
            )
        if y is not x or self.cache_enabled:
            raise ValueError(
                f"a {type(mask).__name__} serves self-attention without a KV cache; pass a bool "
                "mask [b, s, s] for anything else"
            )
        rows, positions = _batch_of(mask)
        if rows != x.shape[0] or positions != x.shape[1]:
            raise ValueError(
                f"the mask is for {rows} rows of {positions} positions and the batch has "
                f"{x.shape[0]} rows of {x.shape[1]}; make one mask per batch with "
                "attn.prepare(seq_lens, s)"
            )
        return True


def _batch_of(mask: Any) -> tuple[int, int]:
    """Rows and positions that a layout or BlockMask was made for."""
    if isinstance(mask, BlockMask):
        return mask.kv_num_blocks.shape[0], mask.seq_lengths[0]
    return mask.batch_size, mask.seq_len


class PackedAttention(PackedLayer, MultiHeadAttention):
    """torchtune's ``MultiHeadAttention`` for packed batches."""


class PackedGemma2Attention(PackedLayer, Gemma2Attention):
    """torchtune's ``Gemma2Attention`` (soft cap, sliding window) for packed batches."""


_PACKED: dict[type, type] = {
    MultiHeadAttention: PackedAttention,
    Gemma2Attention: PackedGemma2Attention,
}


def is_known_attention(layer: nn.Module) -> bool:
    """Whether a layer runs an attention forward that this package knows.

    A subclass that keeps ``MultiHeadAttention.forward`` or ``Gemma2Attention.forward`` is known.
    One with a forward of its own may do anything with a mask, so it is not.
    """
    known: list[Any] = [MultiHeadAttention, Gemma2Attention, PackedLayer]
    return type(layer).forward in [kind.forward for kind in known]


def attention_name(layer: nn.Module) -> str:
    """The name of an attention layer's own class, prepared for packed batches or not."""
    return next(kind.__name__ for kind in type(layer).__mro__ if not issubclass(kind, PackedLayer))


def pack_layer(
    layer: nn.Module, backend: str, kernel: Kernel | None, mask_types: tuple[type, ...]
) -> None:
    """Turns a known attention layer into its packed class, in place; again to change the backend.

    Args:
        layer: an attention layer for which ``is_known_attention`` holds.
        backend: name of the backend.
        kernel: what computes attention under its masks; None when bool masks are all it takes.
        mask_types: classes of those masks.
    """
    own = type(layer)
    if not isinstance(layer, PackedLayer):
        # Sharding, for one, makes subclasses of its own; they keep what they added.
        layer.__class__ = _PACKED.get(own) or type(f"Packed{own.__name__}", (PackedLayer, own), {})
    packed: Any = layer
    packed.packed_backend = backend
    packed.packed_kernel = kernel
    packed.packed_mask_types = mask_types
    packed.packed_ran = None
