"""The packed data set: a token store seen through a plan.

Nothing is copied when packs are made: a pack is a list of slices of the store, joined when it is
asked for. ``[i]`` gives real documents only; padding, positions and the mask belong to the batch.
"""

from __future__ import annotations

import logging
import operator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtune_packing.packing_stats import PackingStats, packing_stats
from torchtune_packing.plan import PackPlan, plan_packs
from torchtune_packing.store import TokenStore
from torchtune_packing.store.cache import (
    check_against,
    check_cache_arguments,
    check_num_workers,
    open_or_build,
    own_key,
)
from torchtune_packing.store.progress import is_main_process
from torchtune_packing.types import IGNORE_INDEX, Pack

__all__ = ["PackedDataset", "refuse_shifted"]

logger = logging.getLogger(__name__)

#: Below this share of real tokens a data set of several packs is worth a warning.
_LOW_FILL = 0.9

#: So many trained labels, all equal to the next token, are no chance.
_ENOUGH_LABELS = 8
#: Tokens at the start of a store that are looked at.
_LOOKED_AT = 1 << 16


class PackedDataset(torch.utils.data.Dataset[Pack]):
    """Packs the documents of a data set into rows of at most ``max_seq_len`` tokens.

        ds    [1 2 3]  [4 5]  [6 7 8 9]            max_seq_len=6
        [0]   tokens [6 7 8 9 4 5]  labels [. 7 8 9 . 5]  seq_lens [4 2]      . = IGNORE_INDEX
        [1]   tokens [1 2 3]        labels [. 2 3]        seq_lens [3]

    The first label of every document is ``IGNORE_INDEX``: it could only be predicted from the
    document before it. So a consumer that shifts a whole pack by one trains nothing across the
    boundary. ``[i]`` returns fresh tensors ``{"tokens": int64 [n], "labels": int64 [n],
    "seq_lens": int64 [d]}`` with ``n <= max_seq_len``.

    Samples without any trained token are kept (they are context for nothing, but they are yours)
    and counted in ``stats``.

    Args:
        ds: map-style data set whose samples are ``{"tokens": [...], "labels": [...]}``, labels
            unshifted, -100 where nothing is trained; or a ``TokenStore``.
        max_seq_len: most tokens in a pack.
        padding_idx: token id that a collate pads with; kept as an attribute.
        max_packs: stop after so many packs; what is left out is counted.
        split_across_pack: lay documents end to end in data order and cut them where a pack ends.
        strategy: "best_fit" (new neighbours every epoch) or "sequential" (data order).
        overlong: what to do with a document longer than ``max_seq_len``: "error", "drop",
            "truncate" or "split".
        seed: decides with the epoch which documents of equal length go where.
        labels_are_shifted: the samples' ``labels[t]`` is the target of position t.
        cache_dir: folder for the store's files; None keeps the tokens in memory.
        cache_key: name of the store in ``cache_dir``. It must change whenever the tokens do. Data
            sets of torchtune and of Hugging Face's library bring one of their own.
        num_workers: worker processes that read samples while the store is built.

    Raises:
        ValueError: a sample breaks the contract, nothing is left to pack or to train, a document
            is too long and ``overlong="error"``, or an argument is out of range.
    """

    def __init__(
        self,
        ds: Any,
        *,
        max_seq_len: int,
        padding_idx: int = 0,
        max_packs: int | None = None,
        split_across_pack: bool = False,
        strategy: str = "best_fit",
        overlong: str = "error",
        seed: int = 0,
        labels_are_shifted: bool = False,
        cache_dir: str | Path | None = None,
        cache_key: str | None = None,
        num_workers: int = 0,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.padding_idx = padding_idx
        self.max_packs = max_packs
        self.split_across_pack = split_across_pack
        self.strategy = strategy
        self.overlong = overlong
        self.seed = seed
        # Every argument is looked at before anything is read.
        plan_packs([1], **self._plan_arguments())
        check_num_workers(num_workers)
        self.max_seq_len = operator.index(max_seq_len)
        self.store = _store_of(
            ds,
            labels_are_shifted=labels_are_shifted,
            cache_dir=cache_dir,
            cache_key=cache_key,
            num_workers=num_workers,
        )
        _check_store(self.store)
        refuse_shifted(self.store)
        if overlong == "error" and not split_across_pack:
            _refuse_overlong(self.store, self.max_seq_len)
        # In shared memory, so that persistent loader workers see a new epoch too.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._planned_epoch = 0
        self._stats: PackingStats | None = None
        self._plan = self._make_plan(0)
        _refuse_untrained(self.store, self._plan)
        self._log()

    def _plan_arguments(self) -> dict[str, Any]:
        return {
            "max_seq_len": self.max_seq_len,
            "strategy": self.strategy,
            "overlong": self.overlong,
            "split_across_pack": self.split_across_pack,
            "max_packs": self.max_packs,
            "seed": self.seed,
        }

    def _make_plan(self, epoch: int, **changes: Any) -> PackPlan:
        arguments = self._plan_arguments() | {"epoch": epoch} | changes
        return plan_packs(self.store.seq_lens, **arguments)

    @property
    def epoch(self) -> int:
        """Epoch of the current plan."""
        return int(self._epoch[0])

    @property
    def plan(self) -> PackPlan:
        """Which documents lie in which pack, in this epoch."""
        epoch = int(self._epoch[0])
        if epoch != self._planned_epoch:
            self._plan = self._make_plan(epoch)
            self._planned_epoch = epoch
            self._stats = None
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Plans anew for an epoch: other neighbours under "best_fit", the same number of packs.

        Loader workers that are already running follow with their next pack, so call this between
        two passes over a loader, never during one.

        Args:
            epoch: number of the epoch, from 0.
        """
        self._epoch[0] = epoch
        _ = self.plan

    @property
    def max_documents(self) -> int:
        """Most documents in a pack of the current plan."""
        return self.plan.max_documents

    @property
    def stats(self) -> PackingStats:
        """Exact counts of the current plan: packed, dropped, truncated, cut, trained, fill."""
        plan = self.plan
        if self._stats is None:
            self._stats = packing_stats(self.store, plan)
        return self._stats

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.plan)

    def __getitem__(self, index: int) -> Pack:
        """Pack ``index`` (negative counts from the end) as fresh tensors."""
        plan, position = self.plan, operator.index(index)
        if position < 0:
            position += len(plan)
        if not 0 <= position < len(plan):
            raise IndexError(f"pack {index} does not exist; there are {len(plan)} packs")
        spans = slice(plan.pack_offsets[position], plan.pack_offsets[position + 1])
        lengths = plan.lengths[spans]
        ends = np.cumsum(lengths)
        begins = self.store.offsets[plan.documents[spans]] + plan.starts[spans]
        # Where in the store every token of the pack lies; one gather costs the same however many
        # documents there are, which joining slices does not.
        where = np.arange(ends[-1])
        where += np.repeat(begins - (ends - lengths), lengths)
        tokens = self.store.tokens[where].astype(np.int64)
        labels = self.store.labels[where].astype(np.int64)
        labels[ends - lengths] = IGNORE_INDEX
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "seq_lens": torch.from_numpy(lengths.astype(np.int64)),
        }

    def _log(self) -> None:
        if not is_main_process():
            return
        plan = self._plan
        if logger.isEnabledFor(logging.INFO):
            logger.info("Packed %s", self.stats)
        # As few packs as these tokens can have: nothing would raise the fill.
        fewest = -(-plan.num_tokens // self.max_seq_len)
        if plan.fill < _LOW_FILL and len(plan) > fewest:
            logger.warning(
                "Only %.1f %% of each pack is real tokens (%s/%s in %s packs); %s.",
                100 * plan.fill,
                *(f"{n:,}" for n in (plan.num_tokens, len(plan) * self.max_seq_len, len(plan))),
                self._advice(fewest),
            )

    def _advice(self, fewest: int) -> str:
        """What would raise the fill, tried out rather than guessed: a plan is cheap."""
        if self.strategy != "best_fit":
            better = self._make_plan(0, strategy="best_fit")
            if better.fill > self._plan.fill:
                return (
                    f"strategy='best_fit' would need {len(better):,} packs "
                    f"(fill {100 * better.fill:.1f} %)"
                )
        longer = self._make_plan(0, strategy="best_fit", max_seq_len=2 * self.max_seq_len)
        if longer.fill > self._plan.fill:
            return (
                f"max_seq_len={2 * self.max_seq_len} with strategy='best_fit' would fill "
                f"{100 * longer.fill:.1f} %"
            )
        return f"split_across_pack=True would cut documents and need {fewest:,} packs"


def _store_of(
    ds: Any,
    *,
    labels_are_shifted: bool,
    cache_dir: str | Path | None,
    cache_key: str | None,
    num_workers: int,
) -> TokenStore:
    check_cache_arguments(cache_dir, cache_key)
    if isinstance(ds, TokenStore):
        return ds
    if cache_dir is None:
        return TokenStore.from_samples(
            ds, num_workers=num_workers, labels_are_shifted=labels_are_shifted
        )
    if cache_key is None:
        cache_key = own_key(ds)
    if cache_key is None:
        raise ValueError(
            f"cache_dir={str(cache_dir)!r} needs a cache_key: a {type(ds).__name__} does not tell "
            "when its tokens change, so give a name that you change together with the data, the "
            "tokenizer or the template"
        )
    store = open_or_build(
        cache_dir,
        cache_key,
        lambda: ds,
        num_workers=num_workers,
        labels_are_shifted=labels_are_shifted,
    )
    check_against(store, ds)
    return store


def _check_store(store: TokenStore) -> None:
    if not len(store):
        raise ValueError(
            f"no non-empty samples: the data set has {store.accounting.num_samples} samples and "
            "none holds a token; check its source and filters"
        )


def refuse_shifted(store: TokenStore) -> None:
    """Raises when labels are those of the next token, which would train a model to skip one.

    Looks at the first documents. A label of a token's own is equal to the token; where every
    trained one is equal to the next token instead, the source has shifted them.

    Args:
        store: documents whose labels should be unshifted.

    Raises:
        ValueError: the labels are shifted.
    """
    whole = max(1, int(np.searchsorted(store.offsets, _LOOKED_AT, side="right")) - 1)
    end = int(store.offsets[whole])
    tokens, labels = store.tokens[:end], store.labels[:end]
    is_target = labels != IGNORE_INDEX
    is_target[store.offsets[1 : whole + 1] - 1] = False  # the next token is another document's
    where = np.flatnonzero(is_target)
    is_next, is_own = labels[where] == tokens[where + 1], labels[where] == tokens[where]
    if len(where) >= _ENOUGH_LABELS and is_next.all() and is_own.mean() < 0.5:
        raise ValueError(
            f"the labels look shifted already: in all {len(where):,} trained positions looked at, "
            "labels[t] is tokens[t + 1]; set labels_are_shifted to True, or let the source give "
            "every token its own label"
        )


def _refuse_overlong(store: TokenStore, max_seq_len: int) -> None:
    overlong = store.seq_lens > max_seq_len
    count = int(np.count_nonzero(overlong))
    if not count:
        return
    document = int(overlong.argmax())
    others = f", and {count - 1:,} more are too long" if count > 1 else ""
    raise ValueError(
        f"sample {store.sample_index(document)} does not fit into a pack "
        f"({store.seq_lens[document]} > {max_seq_len} tokens){others}; raise max_seq_len, or set "
        "overlong to 'drop', 'truncate' or 'split'"
    )


def _refuse_untrained(store: TokenStore, plan: PackPlan) -> None:
    """Raises when the packs hold no label at all, before a model is loaded for nothing."""
    # Nearly always one of the first documents settles it; then the others are not looked at.
    for spans in (slice(4096), slice(None)):
        documents, lengths = plan.documents[spans], plan.lengths[spans]
        whole = (plan.starts[spans] == 0) & (lengths == store.seq_lens[documents])
        if store.trained[documents[whole]].any():
            return
    begins = store.offsets[plan.documents] + plan.starts
    for begin, length in zip(begins.tolist(), plan.lengths.tolist(), strict=True):
        if (store.labels[begin : begin + length] != IGNORE_INDEX).any():
            return
    raise ValueError(
        f"none of the {len(store):,} samples has a trained token within a pack: every label is "
        f"{IGNORE_INDEX}; check the label masking, or raise max_seq_len (and "
        "tokenizer.max_seq_len, where it is set) if truncation cut the answers off"
    )
