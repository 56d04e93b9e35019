"""The token store: every document of a data set once, 8 bytes a token, independent of any plan."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_packing.store.accounting import DocumentTable, StoreAccounting
from torchtune_packing.store.files import open_arrays, read_meta, verify_arrays, write_store
from torchtune_packing.store.ingest import iterate_chunks
from torchtune_packing.store.progress import Progress, is_main_process

__all__ = ["TokenStore"]


class TokenStore:
    """All documents of a data set, end to end.

        samples   [7 8 9]  []  [4 5]
        tokens     7 8 9        4 5      int32 [T]
        seq_lens   3            2        int32 [n]
        offsets    0            3    5   int64 [n + 1]
        empty          1                 int64 [number of empty samples]

    Labels lie as they belong to their tokens (unshifted), with ``IGNORE_INDEX`` where nothing is
    trained. A store knows nothing of pack lengths, strategies or seeds: changing those never
    tokenizes again.

    Args:
        arrays: ``tokens`` and ``labels`` int32 ``[T]``; ``seq_lens`` int32 ``[n]``, all greater
            than 0, summing to T; ``trained`` int32 ``[n]``, trained targets of each document;
            ``empty`` int64, indices of the samples that were left out because they hold no token.
        accounting: the counts.
        path: folder of the files, None for a store in memory.
        meta: content of ``meta.json``.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        accounting: StoreAccounting,
        *,
        path: Path | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokens = arrays["tokens"]
        self.labels = arrays["labels"]
        self.seq_lens = arrays["seq_lens"]
        self.trained = arrays["trained"]
        self.empty = arrays["empty"]
        self.accounting = accounting
        self.path = path
        self.meta = dict(meta or {})

    @classmethod
    def from_samples(
        cls,
        ds: Any,
        *,
        num_workers: int = 0,
        labels_are_shifted: bool = False,
        progress: bool = True,
    ) -> TokenStore:
        """Reads a data set into memory.

        Args:
            ds: map-style data set of samples ``{"tokens", "labels"}``, or an iterable of them.
            num_workers: worker processes that read samples; the result is the same for any number.
            labels_are_shifted: the source's ``labels[t]`` is the target of position t (torchtune's
                development branch) instead of the label of ``tokens[t]``.
            progress: show a bar on rank 0.

        Raises:
            ValueError: a sample does not meet the contract; the message names it.
            SampleReadError: the data set raised.
        """
        table = DocumentTable()
        tokens, labels = array("i"), array("i")
        chunks = iterate_chunks(ds, num_workers=num_workers, labels_are_shifted=labels_are_shifted)
        with Progress(_length(ds), "Tokenizing", enabled=progress and is_main_process()) as bar:
            for chunk in chunks:
                # array grows by realloc, which moves pages rather than copying them: no moment
                # holds the tokens twice.
                tokens.frombytes(chunk.tokens.view(np.uint8).data)
                labels.frombytes(chunk.labels.view(np.uint8).data)
                table.add(chunk)
                bar.update(len(chunk.seq_lens))
        arrays = {
            "tokens": np.frombuffer(tokens, dtype=np.int32),
            "labels": np.frombuffer(labels, dtype=np.int32),
            **table.arrays(),
        }
        return cls(arrays, table.accounting())

    @classmethod
    def build(
        cls,
        path: str | Path,
        ds: Any,
        *,
        num_workers: int = 0,
        labels_are_shifted: bool = False,
        progress: bool = True,
        meta: Mapping[str, Any] | None = None,
    ) -> TokenStore:
        """Reads a data set into files; memory does not grow with its tokens.

        Args:
            path: folder of the store; it appears, complete, when all is written.
            ds: see ``from_samples``, as for the next three.
            num_workers: worker processes.
            labels_are_shifted: the labels are targets.
            progress: show a bar.
            meta: more entries for ``meta.json``.

        Raises:
            ValueError: a sample does not meet the contract.
            SampleReadError: the data set raised.
            OSError: the folder cannot be written or the disk is full.
        """
        chunks = iterate_chunks(ds, num_workers=num_workers, labels_are_shifted=labels_are_shifted)
        with Progress(_length(ds), "Tokenizing", enabled=progress) as bar:
            write_store(
                Path(path),
                chunks,
                meta={"labels_are_shifted": labels_are_shifted, **(meta or {})},
                on_chunk=lambda chunk: bar.update(len(chunk.seq_lens)),
            )
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Maps a store's files into memory, read-only, so that processes share one page cache.

        Args:
            path: folder of the store.

        Raises:
            StoreError: the folder does not hold a whole store of this version.
        """
        folder = Path(path)
        meta = read_meta(folder)
        arrays, accounting = open_arrays(folder, meta)
        return cls(arrays, accounting, path=folder, meta=meta)

    def verify(self) -> None:
        """Compares every array in the files with its checksum.

        Raises:
            StoreError: something was changed after it was written.
        """
        if self.path is not None:
            verify_arrays(self.path, read_meta(self.path))

    def __getstate__(self) -> dict[str, Any]:
        """Files travel to other processes by name; they are mapped there again, not copied."""
        return self.__dict__ if self.path is None else {"path": self.path.absolute()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        path = state.get("path")
        self.__dict__.update(state if path is None else TokenStore.open(path).__dict__)

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 ``[n + 1]``: document i is ``tokens[offsets[i] : offsets[i + 1]]``."""
        offsets = np.zeros(len(self.seq_lens) + 1, dtype=np.int64)
        np.cumsum(self.seq_lens, dtype=np.int64, out=offsets[1:])
        return offsets

    @cached_property
    def checksum(self) -> str:
        """One hash of the content, the same in memory and on disk.

        With files it is made of the checksums in ``meta.json`` and reads no token.
        """
        digest = hashlib.sha256()
        for name in ("tokens", "labels", "seq_lens"):
            if self.path is not None:
                part = self.meta["files"][f"{name}.npy"]["sha256"]
            else:
                part = hashlib.sha256(getattr(self, name).view(np.uint8).data).hexdigest()
            digest.update(part.encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.seq_lens)

    def document(self, index: int) -> dict[str, np.ndarray]:
        """Tokens and labels of one document as read-only views."""
        begin, end = self.offsets[index], self.offsets[index + 1]
        return {"tokens": self.tokens[begin:end], "labels": self.labels[begin:end]}

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Tokens and labels of one sample of the data set, empty ones included."""
        before = int(np.searchsorted(self.empty, index))
        if before < len(self.empty) and self.empty[before] == index:
            return {"tokens": self.tokens[:0], "labels": self.labels[:0]}
        return self.document(index - before)

    def sample_index(self, document: int) -> int:
        """Index in the data set of a document; empty samples before it shift the two apart."""
        # The j-th empty sample has j empty ones before it, so empty[j] - j documents.
        before = np.searchsorted(self.empty - np.arange(len(self.empty)), document, side="right")
        return document + int(before)


def _length(ds: Any) -> int | None:
    return len(ds) if hasattr(ds, "__len__") else None
