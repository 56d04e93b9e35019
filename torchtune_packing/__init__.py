"""Sequence packing for torchtune: packed equals unpacked, and packing costs nothing.

Importing this package imports torch and numpy only. What needs torchtune has its own module:
``torchtune_packing.attention``, ``torchtune_packing.datasets`` and ``torchtune_packing.models``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULE_OF = {
    "PackedDataset": "dataset",
    "block_causal_block_mask": "masks",
    "block_causal_mask": "masks",
    "collate_flattened": "collate",
    "collate_packed": "collate",
    "cu_seqlens": "masks",
    "document_ids": "masks",
    "document_starts": "masks",
    "plan_packs": "plan",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
