"""Sequence packing for torchtune: packed equals unpacked, and packing costs nothing.

Importing this package imports torch and numpy only. What needs torchtune has its own module:
``torchtune_packing.attention``, ``torchtune_packing.datasets`` and ``torchtune_packing.models``.
"""

from torchtune_packing.collate import collate_flattened, collate_packed
from torchtune_packing.dataset import PackedDataset
from torchtune_packing.masks import (
    block_causal_block_mask,
    block_causal_mask,
    cu_seqlens,
    document_ids,
    document_starts,
)
from torchtune_packing.plan import plan_packs

__version__ = "0.1.0"

__all__ = [
    "PackedDataset",
    "block_causal_block_mask",
    "block_causal_mask",
    "collate_flattened",
    "collate_packed",
    "cu_seqlens",
    "document_ids",
    "document_starts",
    "plan_packs",
]
