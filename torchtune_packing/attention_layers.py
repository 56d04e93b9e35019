"""torchtune's attention layers, able to take a document layout or a BlockMask.

:func:`~torchtune_packing.attention.install_attention` gives each attention layer of a model one of
these classes instead of its own. Parameters, buffers, hooks and state-dict keys stay; only
``forward`` changes, and that only for masks that torchtune's own forward cannot use: with a bool
mask, and with a KV cache, the layer still runs torchtune's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import MultiHeadAttention

__all__ = ["Kernel", "PackedAttention", "PackedGemma2Attention", "packed_class"]

#: ``kernel(layer, q, k, v, mask)``: q ``[b, s, h, head_dim]``, k and v ``[b, s, kv heads,
#: head_dim]``, output like q.
Kernel = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


class _Packed:
    """What both classes share: which masks are taken, and what is said about the others."""

    packed_backend: str
    packed_mask_type: type
    packed_kernel: Kernel | None

    def _check(self, x: torch.Tensor, y: torch.Tensor | None, mask: Any) -> bool:
        """True when the kernel of this backend is to run, False when torchtune's own code is."""
        if mask is None:
            if self.cache_enabled:  # type: ignore[attr-defined]
                return False
            raise ValueError(
                "this model was prepared for packed batches and was called with mask=None, which "
                "would let documents attend to each other; pass mask=attn.prepare(seq_lens, s) "
                "with the batch's seq_lens (or a bool mask [b, s, s])"
            )
        if isinstance(mask, torch.Tensor):
            return False
        if self.packed_kernel is None or not isinstance(mask, self.packed_mask_type):
            raise ValueError(
                f"the attention backend is {self.packed_backend!r}, and it cannot take a mask of "
                f"type {type(mask).__name__}; make the mask with attn.prepare(seq_lens, s)"
            )
        if y is not x or self.cache_enabled:  # type: ignore[attr-defined]
            raise ValueError(
                f"a {type(mask).__name__} serves self-attention without a KV cache; pass a bool "
                "mask [b, s, s] for anything else"
            )
        return True


class PackedAttention(_Packed, MultiHeadAttention):
    """torchtune's ``MultiHeadAttention`` for packed batches."""

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
            ValueError: When there is no mask and no KV cache, or the mask is of another backend.
        """
        if not self._check(x, y, mask):
            out: torch.Tensor = super().forward(x, y, mask=mask, input_pos=input_pos)
            return out
        # The steps and their order are torchtune's. Heads stay in dimension 2 for the kernels;
        # torchtune normalises over the last dimension of the transposed tensor, which is the same.
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        if self.pos_embeddings is not None:
            q = self.pos_embeddings(q, input_pos=input_pos)
            k = self.pos_embeddings(k, input_pos=input_pos)
        if self.q_norm is not None:
            q = self.q_norm(q.transpose(1, 2)).transpose(1, 2)
            k = self.k_norm(k.transpose(1, 2)).transpose(1, 2)
        assert self.packed_kernel is not None
        attended = self.packed_kernel(self, q, k, v, mask)
        projected: torch.Tensor = self.output_proj(attended.reshape(b, s, -1))
        return projected


class PackedGemma2Attention(_Packed, Gemma2Attention):
    """torchtune's ``Gemma2Attention`` (soft cap, sliding window) for packed batches."""

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        *,
        mask: Any = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention within each document; arguments as in :class:`PackedAttention`."""
        self._check(x, y, mask)
        out: torch.Tensor = super().forward(x, y, mask=mask, input_pos=input_pos)
        return out


_PACKED: dict[Any, Any] = {
    MultiHeadAttention: PackedAttention,
    Gemma2Attention: PackedGemma2Attention,
}


def packed_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class of this module that serves an attention layer, None when it is of no known kind.

    A layer is known when it runs ``MultiHeadAttention.forward`` or ``Gemma2Attention.forward``
    unchanged (or was prepared before): a subclass with its own forward may do anything.
    """
    for known, packed in _PACKED.items():
        if type(layer).forward in (known.forward, packed.forward):
            found: type[nn.Module] = packed
            return found
    return None
