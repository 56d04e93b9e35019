"""Token columns that exist already: Parquet, Arrow, Hugging Face data sets, column by column.

A list column is one flat array of values and one of offsets, which is what a store is. So rows go
in by the hundred without a Python object for any of them.

Columns that are taken by their name, the first that is there:

- token ids, lists of integers: ``tokens``, ``input_ids``;
- ``labels``, one per token, unshifted, -100 where nothing is trained;
- else a mask: ``mask`` is torchtune's, true (or 1) where nothing is trained; ``loss_mask``,
  ``completion_mask`` and ``assistant_masks`` are true where it is.

Any other name has to be given. All other columns are ignored.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_packing.store.ingest import Chunk, finish_chunk
from torchtune_packing.types import IGNORE_INDEX

__all__ = ["TokenColumns", "token_columns_of"]

_TOKEN_NAMES = ("tokens", "input_ids")
_MASK_MEANS = {
    "mask": "ignored",
    "loss_mask": "trained",
    "completion_mask": "trained",
    "assistant_masks": "trained",
}
#: Rows that are decoded at a time; with rows of 131,072 tokens that is 130 MB.
_BATCH_ROWS = 128
_INT32 = np.iinfo(np.int32)


class TokenColumns:
    """Tokens and labels of Parquet or Arrow files, or of a Hugging Face data set.

    Args:
        data: files (one path, several, or a pattern; in the order given, a pattern's sorted) or a
            ``datasets.Dataset``.
        token_column: None takes ``tokens`` or ``input_ids``.
        label_column: None takes ``labels`` where there is such a column. Naming the token column
            here trains on every token.
        mask_column: column of true and false (or 1 and 0) to make labels from.
        mask_means: what true means there: "trained" or "ignored". Needed for a mask column of
            another name than those of this module.

    Raises:
        ValueError: a file or column is missing or of another type, or it is not plain which columns
            to take. Nothing but the files' descriptions is read for that.
    """

    def __init__(
        self,
        data: Any,
        *,
        token_column: str | None = None,
        label_column: str | None = None,
        mask_column: str | None = None,
        mask_means: str | None = None,
    ) -> None:
        is_files = isinstance(data, str | Path | list | tuple)
        self._parts: list[Any] = (
            [_File(path) for path in _paths(data)] if is_files else [_Hub(data)]
        )
        first = self._parts[0]
        self.token_column = _choose(token_column, _TOKEN_NAMES, first, "token_column")
        self.label_column, self.mask_column, self.mask_means = _choose_labels(
            first, label_column, mask_column, mask_means
        )
        self.columns = [self.token_column, self.label_column or self.mask_column or ""]
        for part in self._parts:
            _require(part, self.token_column)
            _require(part, self.columns[1], is_mask=self.mask_column is not None)
        self._sizes = [part.num_rows for part in self._parts]

    def __len__(self) -> int:
        """Rows of all files."""
        return sum(self._sizes)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One row as a sample."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        chunk = next(self.chunks(begin=index, end=index + 1))
        return {"tokens": chunk.tokens, "labels": chunk.labels}

    def chunks(
        self, *, labels_are_shifted: bool = False, begin: int = 0, end: int | None = None
    ) -> Iterator[Chunk]:
        """Yields rows ``begin`` up to ``end`` as chunks.

        Raises:
            ValueError: a row has a null, a value out of range, or as many labels as it has not
                tokens, and the message names the row and the file; or a file is damaged.
        """
        end = len(self) if end is None else end
        offset = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            low, high = max(begin - offset, 0), min(end - offset, size)
            if low < high:
                row = offset + low
                for batch in part.batches(list(dict.fromkeys(self.columns)), low, high):
                    yield self._chunk(batch, row, part.name, labels_are_shifted)
                    row += batch.num_rows
            offset += size

    def _chunk(self, batch: Any, row: int, where: str, labels_are_shifted: bool) -> Chunk:
        tokens, lengths = _flat(batch.column(self.token_column), self.token_column, row, where)
        tokens = _to_int32(tokens, lengths, self.token_column, row, where)
        name = self.columns[1]
        labels, label_lengths = tokens, lengths
        if name != self.token_column:
            labels, label_lengths = _flat(batch.column(name), name, row, where)
        if not np.array_equal(lengths, label_lengths):
            bad = int(np.flatnonzero(lengths != label_lengths)[0])
            raise ValueError(
                f"sample {row + bad} ({where}) has {lengths[bad]} values in {self.token_column} "
                f"but {label_lengths[bad]} in {name}; every token needs one"
            )
        if self.label_column is None:
            chosen = _to_bool(labels, lengths, name, row, where)
            trained = chosen if self.mask_means == "trained" else ~chosen
            labels = np.where(trained, tokens, np.int32(IGNORE_INDEX))
        elif name != self.token_column:
            labels = _to_int32(labels, lengths, name, row, where)
        return finish_chunk(tokens, labels, lengths, labels_are_shifted, row, where)


def token_columns_of(ds: Any) -> TokenColumns | None:
    """The columns of a Hugging Face data set that holds tokens, None for any other object.

    A data set with a transform computes its rows when they are read, so it is not taken here.
    """
    if isinstance(ds, TokenColumns):
        return ds
    if type(ds).__module__ != "datasets.arrow_dataset" or ds.format["type"] == "custom":
        return None
    return TokenColumns(ds) if set(ds.column_names) & set(_TOKEN_NAMES) else None


class _File:
    """One Parquet or Arrow file."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self.name = str(path)
        self.is_parquet = path.suffix == ".parquet"
        with self._named_errors():
            if self.is_parquet:
                # Spark writes a checksum with every page; where there is none, none is compared.
                self.parquet = pyarrow.parquet.ParquetFile(
                    path, memory_map=True, page_checksum_verification=True
                )
                self.schema = self.parquet.schema_arrow
                self.num_rows = self.parquet.metadata.num_rows
            else:
                self.table = _read_arrow(path)
                self.schema = self.table.schema
                self.num_rows = self.table.num_rows

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Says of which file it is that something cannot be read."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            kind = "Parquet" if self.is_parquet else "Arrow"
            raise ValueError(
                f"the data file {self.name} cannot be read as {kind}: "
                f"{str(error).splitlines()[0].rstrip('.')}; write it again"
            ) from error

    def batches(self, columns: Sequence[str], begin: int, end: int) -> Iterator[Any]:
        with self._named_errors():
            if self.is_parquet:
                yield from self._parquet_batches(columns, begin, end)
            else:
                rows = self.table.select(columns).slice(begin, end - begin)
                yield from rows.to_batches(_BATCH_ROWS)

    def _parquet_batches(self, columns: Sequence[str], begin: int, end: int) -> Iterator[Any]:
        row = 0
        for group in range(self.parquet.num_row_groups):
            size = self.parquet.metadata.row_group(group).num_rows
            if row < end and row + size > begin:
                yield from self._group(group, columns, max(begin - row, 0), min(end - row, size))
            row += size

    def _group(self, group: int, columns: Sequence[str], begin: int, end: int) -> Iterator[Any]:
        row = 0
        batches = self.parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)
        for batch in batches:
            low, high = max(begin - row, 0), min(end - row, batch.num_rows)
            if low < high:
                yield batch.slice(low, high - low)
            row += batch.num_rows
            if row >= end:
                return


class _Hub:
    """A ``datasets.Dataset``, with whatever selection and order it has."""

    def __init__(self, ds: Any) -> None:
        self.name = "the data set"
        self.ds = ds.with_format("arrow")
        self.schema = ds.features.arrow_schema
        self.num_rows = len(ds)

    def batches(self, columns: Sequence[str], begin: int, end: int) -> Iterator[Any]:
        chosen = self.ds.select_columns(list(columns))
        for row in range(begin, end, _BATCH_ROWS):
            table = chosen[row : min(row + _BATCH_ROWS, end)].combine_chunks()
            yield from table.to_batches()


def _read_arrow(path: Path) -> Any:
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        # Hugging Face's library writes streams, which have no footer.
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _paths(data: Any) -> list[Path]:
    given = [data] if isinstance(data, str | Path) else list(data)
    found: list[Path] = []
    for item in given:
        matches = sorted(glob.glob(str(item), recursive=True))
        if not matches:
            raise ValueError(f"the data file {item} does not exist; correct the path")
        if folders := [match for match in matches if Path(match).is_dir()]:
            raise ValueError(
                f"the data file {folders[0]} is a folder; name the files in it, for example "
                f"{folders[0]}/*.parquet"
            )
        found += [Path(match) for match in matches]
    if not found:
        raise ValueError("no data files are given; name at least one Parquet or Arrow file")
    return found


def _require(part: Any, name: str, *, is_mask: bool = False) -> None:
    """Checks, by the description of a part, that a column is there and holds lists of integers."""
    import pyarrow as pa

    names = part.schema.names
    if name not in names:
        raise ValueError(f"{part.name} has no column {name!r}, only {names}")
    if names.count(name) > 1:
        raise ValueError(f"{part.name} has {names.count(name)} columns {name!r}; keep one of them")
    kind = part.schema.field(name).type
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        raise ValueError(
            f"column {name!r} of {part.name} has the type {kind}; it must be a list of integers"
        )
    values = kind.value_type
    if is_mask and not (pa.types.is_boolean(values) or pa.types.is_integer(values)):
        raise ValueError(
            f"the mask {name!r} of {part.name} has lists of {values}; it must be true and false, "
            "or 1 and 0"
        )
    if not is_mask and not pa.types.is_integer(values):
        raise ValueError(
            f"column {name!r} of {part.name} has lists of {values}; token ids and labels must be "
            "integers, so cast that column"
        )


def _choose(given: str | None, known: Sequence[str], part: Any, argument: str) -> str:
    if given is not None:
        return given
    found = [name for name in known if name in part.schema.names]
    if not found or (len(found) > 1 and argument == "mask_column"):
        several = "more than one of" if found else "none of"
        raise ValueError(
            f"{part.name} has {several} the columns {list(known)} (it has {part.schema.names}); "
            f"name the right one as {argument}"
        )
    return found[0]


def _choose_labels(
    part: Any, label_column: str | None, mask_column: str | None, mask_means: str | None
) -> tuple[str | None, str | None, str | None]:
    """Label column, or mask column with its meaning."""
    if mask_means not in (None, "trained", "ignored"):
        raise ValueError(f"mask_means is {mask_means!r}; it must be 'trained' or 'ignored'")
    if label_column is not None and mask_column is not None:
        raise ValueError(
            f"label_column={label_column!r} and mask_column={mask_column!r} both say what is "
            "trained; name one of them"
        )
    if label_column is None and mask_column is None:
        if "labels" in part.schema.names:
            return "labels", None, None
        if not any(name in part.schema.names for name in _MASK_MEANS):
            raise ValueError(
                f"{part.name} has neither labels nor a mask (it has {part.schema.names}); name "
                "label_column or mask_column; to train on every token, name the token column as "
                "label_column"
            )
        mask_column = _choose(None, tuple(_MASK_MEANS), part, "mask_column")
    if label_column is not None:
        return label_column, None, None
    means = mask_means or _MASK_MEANS.get(mask_column or "")
    if means is None:
        raise ValueError(
            f"mask_column is {mask_column!r}: say with mask_means whether true there means "
            "'trained' or 'ignored'"
        )
    return None, mask_column, means


def _flat(column: Any, name: str, row: int, where: str) -> tuple[Any, np.ndarray]:
    """Values of a list column end to end (an Arrow array), and int32 lengths of its rows."""
    import pyarrow as pa

    if column.null_count:
        bad = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(
            f"sample {row + bad} ({where}) has null in column {name!r}; drop such rows or write an "
            "empty list"
        )
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.full(len(column), column.type.list_size, dtype=np.int32)
    else:
        lengths = np.diff(column.offsets.to_numpy()).astype(np.int32)
    values = column.flatten()
    if values.null_count:
        position = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        bad = _row_of(position, lengths)
        raise ValueError(
            f"sample {row + bad} ({where}) has null among the values of column {name!r}; every "
            "token needs a value"
        )
    return values, lengths


def _to_int32(values: Any, lengths: np.ndarray, name: str, row: int, where: str) -> np.ndarray:
    found = values.to_numpy()
    if found.dtype.itemsize > 4 or found.dtype == np.uint32:
        wrong = (found > _INT32.max) | (found < _INT32.min)
        if wrong.any():
            position = int(wrong.argmax())
            raise ValueError(
                f"sample {row + _row_of(position, lengths)} ({where}) has {found[position]} in "
                f"column {name!r}, outside of int32 ({_INT32.min} to {_INT32.max})"
            )
    return found.astype(np.int32, copy=False)


def _to_bool(values: Any, lengths: np.ndarray, name: str, row: int, where: str) -> np.ndarray:
    import pyarrow as pa

    if pa.types.is_boolean(values.type):
        return values.to_numpy(zero_copy_only=False)
    found = values.to_numpy()
    wrong = (found != 0) & (found != 1)
    if wrong.any():
        position = int(wrong.argmax())
        raise ValueError(
            f"sample {row + _row_of(position, lengths)} ({where}) has {found[position]} in the "
            f"mask {name!r}, which must be 0 or 1"
        )
    return found == 1


def _row_of(position: int, lengths: np.ndarray) -> int:
    """Row that holds a position of the flat values."""
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))
