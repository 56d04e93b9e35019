"""What went into a store, counted while it is built."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass

import numpy as np

from torchtune_packing.store.ingest import Chunk

__all__ = ["DocumentTable", "StoreAccounting"]


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
        largest_id: largest token id or label; the model's vocabulary must be larger. -1 without
            tokens.
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
    largest_id: int

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
        self.largest_id = -1

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
        self.largest_id = max(self.largest_id, chunk.largest_id)

    def arrays(self) -> dict[str, np.ndarray]:
        """``seq_lens`` and ``trained``, int32 ``[n]``, and ``empty``, int64."""
        return {
            "seq_lens": np.frombuffer(self.seq_lens, dtype=np.int32),
            "trained": np.frombuffer(self.trained, dtype=np.int32),
            "empty": np.frombuffer(self.empty, dtype=np.int64),
        }

    def accounting(self) -> StoreAccounting:
        """The counts so far."""
        arrays = self.arrays()
        seq_lens, trained = arrays["seq_lens"], arrays["trained"]
        untrained = trained == 0
        return StoreAccounting(
            num_samples=self.num_samples,
            num_empty=len(arrays["empty"]),
            num_documents=len(seq_lens),
            num_tokens=self.num_tokens,
            num_labels=self.num_labels,
            num_trained_tokens=int(trained.sum(dtype=np.int64)),
            num_untrained_documents=int(np.count_nonzero(untrained)),
            num_untrained_tokens=int(seq_lens[untrained].sum(dtype=np.int64)),
            num_lost_labels=self.num_lost_labels,
            largest_id=self.largest_id,
        )
