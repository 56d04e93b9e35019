"""The token store: every document of a data set once, 8 bytes a token, independent of any plan."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_packing.store.ingest import Chunk, iterate_chunks
from torchtune_packing.store.progress import Progress, is_main_process

__all__ = ["StoreAccounting", "TokenStore"]


@dataclass(frozen=True)
class StoreAccounting:
    """What went into a store.

    Attributes:
        num_samples: samples of the data set, empty ones included.
        num_empty: samples without a token, which are left out.
        num_documents: documents in the store.
        num_tokens: tokens in the store.
        num_labels: labels other than ``IGNORE_INDEX`` at any position.
        num_trained_tokens: those behind the first position of their document. The first label of
            a document is never a target: nothing before it belongs to it.
        num_untrained_documents: documents without a trained token.
        num_untrained_tokens: their tokens.
        num_lost_labels: labels that a source with shifted labels held for the token after its
            last one; they have no place in an unshifted store.
    """

    num_samples: int
    num_empty: int
    num_documents: int
    num_tokens: int
    num_labels: int
    num_trained_tokens: int
    num_untrained_documents: int
    num_untrained_tokens: int
    num_lost_labels: int

    def as_dict(self) -> dict[str, int]:
        """The same as a plain dict."""
        return asdict(self)


class DocumentTable:
    """Per-document arrays and counts, collected chunk by chunk.

    This is all that grows with the number of documents while a store is built.
    """

    def __init__(self) -> None:
        self.seq_lens = array("i")
        self.trained = array("i")
        self.empty = array("q")
        self.num_samples = 0
        self.num_tokens = 0
        self.num_labels = 0
        self.num_lost_labels = 0

    def add(self, chunk: Chunk) -> None:
        """Adds the documents of one chunk; the next chunk must follow it in the data set."""
        full = chunk.seq_lens > 0
        if not full.all():
            self.empty.frombytes((np.flatnonzero(~full) + self.num_samples).tobytes())
        self.seq_lens.frombytes(chunk.seq_lens[full].tobytes())
        self.trained.frombytes(chunk.trained[full].tobytes())
        self.num_samples += len(chunk.seq_lens)
        self.num_tokens += len(chunk.tokens)
        self.num_labels += chunk.num_labels
        self.num_lost_labels += chunk.num_lost_labels

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ``seq_lens`` and ``trained``, int32 ``[n]``, and ``empty``, int64."""
        return (
            np.frombuffer(self.seq_lens, dtype=np.int32),
            np.frombuffer(self.trained, dtype=np.int32),
            np.frombuffer(self.empty, dtype=np.int64),
        )

    def accounting(self) -> StoreAccounting:
        """The counts so far."""
        seq_lens, trained, empty = self.arrays()
        untrained = trained == 0
        return StoreAccounting(
            num_samples=self.num_samples,
            num_empty=len(empty),
            num_documents=len(seq_lens),
            num_tokens=self.num_tokens,
            num_labels=self.num_labels,
            num_trained_tokens=int(trained.sum(dtype=np.int64)),
            num_untrained_documents=int(np.count_nonzero(untrained)),
            num_untrained_tokens=int(seq_lens[untrained].sum(dtype=np.int64)),
            num_lost_labels=self.num_lost_labels,
        )


class TokenStore:
    """All documents of a data set, end to end.

    ::

        samples   [7 8 9]  []  [4 5]
        tokens     7 8 9        4 5      int32 [T]
        seq_lens   3            2        int32 [n]
        offsets    0            3    5   int64 [n + 1]
        empty          1                 int64 [number of empty samples]

    Labels lie as they belong to their tokens (unshifted), with ``IGNORE_INDEX`` where nothing is
    trained. A store knows nothing of pack lengths, strategies or seeds: changing those never
    tokenizes again.

    Args:
        tokens: int32 ``[T]``.
        labels: int32 ``[T]``.
        seq_lens: int32 ``[n]``, all greater than 0, summing to T.
        trained: int32 ``[n]``, trained targets of each document.
        empty: int64, indices of the samples that were left out because they hold no token.
        accounting: the counts.
        path: folder of the files, None for a store in memory.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        labels: np.ndarray,
        seq_lens: np.ndarray,
        trained: np.ndarray,
        empty: np.ndarray,
        accounting: StoreAccounting,
        path: Path | None = None,
    ) -> None:
        self.tokens = tokens
        self.labels = labels
        self.seq_lens = seq_lens
        self.trained = trained
        self.empty = empty
        self.accounting = accounting
        self.path = path

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
        total = len(ds) if hasattr(ds, "__len__") else None
        chunks: Iterable[Chunk] = iterate_chunks(
            ds, num_workers=num_workers, labels_are_shifted=labels_are_shifted
        )
        with Progress(total, "Tokenizing", enabled=progress and is_main_process()) as bar:
            for chunk in chunks:
                # array grows by realloc, which moves pages rather than copying them: no moment
                # holds the tokens twice.
                tokens.frombytes(chunk.tokens.view(np.uint8))
                labels.frombytes(chunk.labels.view(np.uint8))
                table.add(chunk)
                bar.update(len(chunk.seq_lens))
        return cls(
            np.frombuffer(tokens, dtype=np.int32),
            np.frombuffer(labels, dtype=np.int32),
            *table.arrays(),
            table.accounting(),
        )

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 ``[n + 1]``: document i is ``tokens[offsets[i] : offsets[i + 1]]``."""
        offsets = np.zeros(len(self.seq_lens) + 1, dtype=np.int64)
        np.cumsum(self.seq_lens, dtype=np.int64, out=offsets[1:])
        return offsets

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.seq_lens)

    def document(self, index: int) -> dict[str, np.ndarray]:
        """Tokens and labels of one document as read-only views."""
        begin, end = self.offsets[index], self.offsets[index + 1]
        return {"tokens": self.tokens[begin:end], "labels": self.labels[begin:end]}

    def sample_index(self, document: int) -> int:
        """Index in the data set of a document; empty samples before it shift the two apart."""
        # The j-th empty sample has j empty ones before it, so empty[j] - j documents.
        before = np.searchsorted(self.empty - np.arange(len(self.empty)), document, side="right")
        return document + int(before)
