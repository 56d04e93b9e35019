"""Builders for the ``_component_`` of a config's data set."""

import torchtune_packing.needs_torchtune  # noqa: F401

# isort: split
from torchtune_packing.datasets.columns import tokenized_dataset
from torchtune_packing.datasets.docstrings import python_docstrings_dataset
from torchtune_packing.datasets.packed import packed_dataset

__all__ = ["packed_dataset", "python_docstrings_dataset", "tokenized_dataset"]
