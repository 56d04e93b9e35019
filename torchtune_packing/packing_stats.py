"""What became of every document and token of a data set when it was packed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from torchtune_packing.types import IGNORE_INDEX

if TYPE_CHECKING:
    from torchtune_packing.plan import PackPlan
    from torchtune_packing.store import TokenStore

__all__ = ["PackingStats", "packing_stats"]


@dataclass(frozen=True)
class PackingStats:
    """Counts of one plan over one store; every one is exact.

    Attributes:
        num_samples: samples read, empty ones included.
        num_empty: samples without a token.
        num_documents: documents of the store, ``num_samples - num_empty``.
        num_tokens: tokens of the store.
        num_packed_documents: documents of which at least a part is in a pack.
        num_packed_tokens: real tokens in the packs.
        num_dropped_documents: overlong documents left out (``overlong="drop"``).
        num_dropped_tokens: their tokens.
        num_truncated_documents: overlong documents cut short (``overlong="truncate"``).
        num_truncated_tokens: tokens behind those cuts, which are in no pack.
        num_split_documents: documents cut into several spans.
        num_split_tokens: their tokens in the packs.
        num_cuts: places where a document continues in another span.
        num_unused_documents: documents left out by ``max_packs``.
        num_unused_tokens: tokens left out by it.
        num_untrained_documents: documents in packs without any trained target.
        num_untrained_tokens: their tokens in the packs.
        num_packs: packs.
        max_seq_len: tokens that a pack can hold.
        fill: ``num_packed_tokens / (num_packs * max_seq_len)``.
        documents_per_pack_min: fewest spans in a pack.
        documents_per_pack_median: median of the spans in a pack.
        documents_per_pack_max: most spans in a pack.
        num_trained_tokens: targets that the loss sees in one epoch.
        num_targets_lost_at_cuts: targets that would be trained but for a cut just before them.
        attention_cost: sum of squared span lengths.
        attention_cost_ratio: that cost relative to plain causal attention over every padded pack.
    """

    num_samples: int
    num_empty: int
    num_documents: int
    num_tokens: int
    num_packed_documents: int
    num_packed_tokens: int
    num_dropped_documents: int
    num_dropped_tokens: int
    num_truncated_documents: int
    num_truncated_tokens: int
    num_split_documents: int
    num_split_tokens: int
    num_cuts: int
    num_unused_documents: int
    num_unused_tokens: int
    num_untrained_documents: int
    num_untrained_tokens: int
    num_packs: int
    max_seq_len: int
    fill: float
    documents_per_pack_min: int
    documents_per_pack_median: float
    documents_per_pack_max: int
    num_trained_tokens: int
    num_targets_lost_at_cuts: int
    attention_cost: int
    attention_cost_ratio: float

    def as_dict(self) -> dict[str, int | float]:
        """The same as a plain dict, ready for JSON."""
        return asdict(self)

    def __getitem__(self, name: str) -> int | float:
        """A count by its name, so that ``dict(stats)`` and ``stats["fill"]`` work."""
        if name not in self.keys():
            raise KeyError(name)
        value: int | float = getattr(self, name)
        return value

    def keys(self) -> list[str]:
        """Names of all counts."""
        return [field.name for field in fields(self)]

    def __str__(self) -> str:
        """A few lines for a log: what went in, what the packs hold, what was lost."""
        lines = [
            f"{self.num_packed_documents:,} documents, {self.num_packed_tokens:,} tokens "
            f"({self.num_trained_tokens:,} trained) in {self.num_packs:,} packs of "
            f"{self.max_seq_len:,}: fill {_percent(self.fill)} "
            f"({self.num_packed_tokens:,}/{self.num_packs * self.max_seq_len:,})",
            f"{self.documents_per_pack_min:,} to {self.documents_per_pack_max:,} documents in a "
            f"pack (median {self.documents_per_pack_median:g}); attention costs "
            f"{_percent(self.attention_cost_ratio)} of full causal packs",
        ]
        losses = [
            _lost(self.num_empty, "empty sample{s} skipped"),
            _lost(
                self.num_dropped_documents, "overlong document{s} dropped", self.num_dropped_tokens
            ),
            _lost(self.num_truncated_documents, "document{s} truncated", self.num_truncated_tokens),
            _lost(self.num_cuts, "cut{s}", self.num_targets_lost_at_cuts, "target"),
            _lost(
                self.num_unused_documents,
                "document{s} left out by max_packs",
                self.num_unused_tokens,
            ),
            _lost(self.num_untrained_documents, "sample{s} without trainable tokens"),
        ]
        found = "; ".join(text for text in losses if text)
        return "\n".join([*lines, found] if found else lines)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _lost(number: int, text: str, parts: int | None = None, part: str = "token") -> str:
    """``"2 documents truncated (1 token)"``; nothing when there are none."""
    if not number:
        return ""
    words = f"{number:,} " + text.format(s="" if number == 1 else "s")
    return words if parts is None else f"{words} ({parts:,} {part}{'' if parts == 1 else 's'})"


def packing_stats(store: TokenStore, plan: PackPlan) -> PackingStats:
    """Counts what a plan makes of a store.

    Args:
        store: the documents.
        plan: their packs.

    Returns:
        The counts. Only documents that are not whole in the packs are looked at token by token.
    """
    documents, starts, lengths = plan.documents, plan.starts, plan.lengths
    per_pack = np.diff(plan.pack_offsets)
    covered = np.bincount(documents, weights=lengths, minlength=len(store)).astype(np.int64)
    spans = np.bincount(documents, minlength=len(store))
    whole = covered == store.seq_lens
    trained = np.where(whole, store.trained, 0).astype(np.int64)

    # A target goes missing at the first position of every span that continues a document.
    begins = store.offsets[documents] + starts
    continued = np.flatnonzero(starts > 0)
    lost = store.labels[begins[continued]] != IGNORE_INDEX
    trained -= np.bincount(
        documents[continued], weights=lost & whole[documents[continued]], minlength=len(store)
    ).astype(np.int64)

    for span in np.flatnonzero(~whole[documents]).tolist():
        begin, length = int(begins[span]), int(lengths[span])
        labels = store.labels[begin + 1 : begin + length]
        trained[documents[span]] += np.count_nonzero(labels != IGNORE_INDEX)

    present = covered > 0
    untrained = present & (trained == 0)
    cost = int(plan.attention_cost.sum())
    return PackingStats(
        num_samples=store.accounting.num_samples,
        num_empty=store.accounting.num_empty,
        num_documents=len(store),
        num_tokens=store.accounting.num_tokens,
        num_packed_documents=int(np.count_nonzero(present)),
        num_packed_tokens=int(plan.num_tokens),
        num_dropped_documents=plan.num_dropped,
        num_dropped_tokens=plan.num_dropped_tokens,
        num_truncated_documents=plan.num_truncated,
        num_truncated_tokens=plan.num_truncated_tokens,
        num_split_documents=int(np.count_nonzero(spans > 1)),
        num_split_tokens=int(covered[spans > 1].sum()),
        num_cuts=len(continued),
        num_unused_documents=plan.num_unused,
        num_unused_tokens=plan.num_unused_tokens,
        num_untrained_documents=int(np.count_nonzero(untrained)),
        num_untrained_tokens=int(covered[untrained].sum()),
        num_packs=len(plan),
        max_seq_len=plan.max_seq_len,
        fill=float(plan.fill),
        documents_per_pack_min=int(per_pack.min()),
        documents_per_pack_median=float(np.median(per_pack)),
        documents_per_pack_max=int(per_pack.max()),
        num_trained_tokens=int(trained.sum()),
        num_targets_lost_at_cuts=int(np.count_nonzero(lost)),
        attention_cost=cost,
        attention_cost_ratio=cost / (len(plan) * plan.max_seq_len**2),
    )
