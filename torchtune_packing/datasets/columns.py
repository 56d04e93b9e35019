"""``tokenized_dataset``: documents that were tokenized elsewhere, from Parquet or Arrow files."""

from __future__ import annotations

from typing import Any

from torchtune_packing.store.columns import TokenColumns

__all__ = ["tokenized_dataset"]


def tokenized_dataset(
    tokenizer: Any = None,
    *,
    data_files: str | list[str],
    token_column: str | None = None,
    label_column: str | None = None,
    mask_column: str | None = None,
    mask_means: str | None = None,
) -> TokenColumns:
    """Builds a data set from files that hold token columns, as Spark, Dask or Ray jobs write them.

        source:
          _component_: torchtune_packing.datasets.tokenized_dataset
          data_files: tokens/*.parquet
          token_column: input_ids
          mask_column: answer
          mask_means: trained

    Args:
        tokenizer: not used; a recipe passes it to every builder.
        data_files: a path, a pattern (sorted by name), or a list of those.
        token_column: None takes ``tokens`` or ``input_ids``.
        label_column: None takes ``labels``. Naming the token column trains on every token.
        mask_column: column of true and false (or 1 and 0) to make labels from.
        mask_means: what true means there, "trained" or "ignored".

    Raises:
        ValueError: a file or column is missing or of the wrong type.
    """
    return TokenColumns(
        data_files,
        token_column=token_column,
        label_column=label_column,
        mask_column=mask_column,
        mask_means=mask_means,
    )
