"""What packing did to a data set, in lines that a person reads when a run starts.

``PackingStats`` counts; this module shows the counts, works
out what depends on the run (waiting of the ranks, effective batch), and stops a run that would
throw away more tokens than its owner agreed to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchtune_packing.sampler import balanced_shares, epoch_order

if TYPE_CHECKING:
    from torchtune_packing.dataset import PackedDataset
    from torchtune_packing.store import TokenStore

__all__ = [
    "accounting_lines",
    "accounting_table",
    "check_token_loss",
    "effective_batch",
    "sample_lines",
    "waiting",
]


def accounting_table(dataset: PackedDataset) -> list[tuple[str, int, int]]:
    """What became of every document: rows of name, documents, tokens.

    ``documents in`` equals packed, dropped, left out and empty together; the tokens in equal the
    packed, dropped, truncated and left out ones. The rows in between say what is special about
    some of the packed ones.

    Args:
        dataset: the packs.
    """
    stats = dataset.stats
    rows = [
        ("documents in", stats.num_samples, stats.num_tokens),
        ("packed", stats.num_packed_documents, stats.num_packed_tokens),
        ("  of them split over packs", stats.num_split_documents, stats.num_split_tokens),
        ("  without a trained token", stats.num_untrained_documents, stats.num_untrained_tokens),
        ("truncated (tokens cut off)", stats.num_truncated_documents, stats.num_truncated_tokens),
        ("dropped", stats.num_dropped_documents, stats.num_dropped_tokens),
        ("empty", stats.num_empty, 0),
    ]
    if stats.num_unused_documents or stats.num_unused_tokens:
        rows.append(("left out by max_packs", stats.num_unused_documents, stats.num_unused_tokens))
    return rows


def waiting(
    costs: npt.NDArray[Any],
    *,
    batch_size: int,
    gradient_accumulation_steps: int = 1,
    world_size: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    balance: bool = True,
) -> float:
    """Share of attention time that ranks spend waiting for the slowest one, over the first epoch.

    The time of a micro-step is that of its slowest rank, so the share is
    ``1 - sum(mean over ranks) / sum(max over ranks)``.

        costs of a micro-step   rank 0: 9   rank 1: 3      waiting = 1 - 6/9 = 33 %

    Args:
        costs: attention cost of each pack, ``[num_packs]``.
        batch_size: packs of one rank in a micro-step.
        gradient_accumulation_steps: micro-steps of an optimizer step.
        world_size: ranks.
        seed: seed of the order.
        shuffle: whether the order is drawn by seed and epoch.
        balance: whether the packs of a step are dealt by cost.

    Returns:
        0 for one rank, for equal costs, and where there are too few packs for one step.
    """
    shape = (gradient_accumulation_steps, world_size, batch_size)
    size = int(np.prod(shape))
    num_steps = len(costs) // size
    if world_size == 1 or not num_steps:
        return 0.0
    order = epoch_order(len(costs), seed=seed, epoch=0, shuffle=shuffle)[: num_steps * size]
    dealt = np.asarray(costs)[order].reshape(num_steps, size)
    if balance and shuffle:
        shares = balanced_shares(
            dealt,
            batch_size=batch_size,
            accumulation=gradient_accumulation_steps,
            world_size=world_size,
        )
        dealt = np.take_along_axis(dealt, shares.reshape(num_steps, -1), axis=1)
    per_rank = dealt.reshape(num_steps, *shape).sum(axis=-1)
    return float(1 - per_rank.mean(axis=-1).sum() / per_rank.max(axis=-1).sum())


def effective_batch(dataset: PackedDataset, packs_per_step: int) -> dict[str, float]:
    """What an optimizer step trains on, on average: documents, real tokens, trained tokens.

    Args:
        dataset: the packs.
        packs_per_step: packs of all ranks and micro-steps of an optimizer step.
    """
    stats, share = dataset.stats, packs_per_step / len(dataset)
    return {
        "documents": len(dataset.plan.documents) * share,
        "tokens": stats.num_packed_tokens * share,
        "trained_tokens": stats.num_trained_tokens * share,
    }


def accounting_lines(
    dataset: PackedDataset,
    world_size: int = 1,
    packs_per_step: int = 1,
    *,
    batch_size: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    balance: bool = True,
) -> list[str]:
    """The block that every recipe prints when it starts; at most 80 columns wide.

    Args:
        dataset: the packs.
        world_size: ranks of the run.
        packs_per_step: packs of an optimizer step, over all ranks and micro-steps.
        batch_size: packs of one rank in a micro-step.
        seed: seed of the order.
        shuffle: as in the sampler.
        balance: as in the sampler.

    Returns:
        Lines without line ends.
    """
    stats, batch = dataset.stats, effective_batch(dataset, packs_per_step)
    lines = _table_lines(accounting_table(dataset), stats.num_tokens)
    capacity = stats.num_packs * stats.max_seq_len
    lines += [
        f"packs: {stats.num_packs:,} of {stats.max_seq_len:,} tokens, fill "
        f"{100 * stats.fill:.2f} % ({stats.num_packed_tokens:,}/{capacity:,})",
        f"documents per pack: {stats.documents_per_pack_min:,} to "
        f"{stats.documents_per_pack_max:,}, median {stats.documents_per_pack_median:g}; trained "
        f"tokens: {100 * stats.num_trained_tokens / stats.num_packed_tokens:.1f} %",
        f"attention: {100 * stats.attention_cost_ratio:.1f} % of what full causal rows would cost",
    ]
    if stats.num_cuts:
        lines.append(
            f"cuts: {stats.num_cuts:,}, which cost {stats.num_targets_lost_at_cuts:,} targets"
        )
    if world_size > 1:
        waits = waiting(
            dataset.plan.attention_cost,
            batch_size=batch_size,
            gradient_accumulation_steps=max(1, packs_per_step // (batch_size * world_size)),
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            balance=balance,
        )
        lines.append(
            f"{world_size} ranks: {100 * waits:.1f} % of their attention time is waiting for the "
            "slowest one"
        )
    lines += [
        f"effective batch: {packs_per_step:,} pack{'s' * (packs_per_step != 1)}, on average "
        f"{batch['documents']:,.1f} documents and {batch['tokens']:,.0f} tokens,",
        f"    of which {batch['trained_tokens']:,.0f} are trained",
    ]
    return lines


def sample_lines(store: TokenStore, steps_per_epoch: int) -> list[str]:
    """The block for data that nobody packed, which runs in rows without padding.

    Args:
        store: the samples.
        steps_per_epoch: optimizer steps that a whole epoch takes.

    Returns:
        Lines without line ends, at most 80 columns wide.
    """
    found = store.accounting
    table = [
        ("documents in", found.num_samples, found.num_tokens),
        ("  without a trained token", found.num_untrained_documents, found.num_untrained_tokens),
        ("empty", found.num_empty, 0),
    ]
    documents, tokens, trained = (
        number / steps_per_epoch
        for number in (len(store), found.num_tokens, found.num_trained_tokens)
    )
    return [
        *_table_lines(table, found.num_tokens),
        f"no padding; longest document: {int(store.seq_lens.max()):,} tokens; trained tokens: "
        f"{100 * found.num_trained_tokens / found.num_tokens:.1f} %",
        f"effective batch: on average {documents:,.1f} documents and {tokens:,.0f} tokens,",
        f"    of which {trained:,.0f} are trained",
    ]


def _table_lines(table: list[tuple[str, int, int]], num_tokens: int) -> list[str]:
    lines = [f"{'':<28}{'documents':>13}{'tokens':>17}{'share':>10}"]
    for name, documents, tokens in table:
        share = 100 * tokens / num_tokens
        lines.append(f"{name:<28}{documents:>13,}{tokens:>17,}{share:>8.2f} %")
    return lines


def check_token_loss(dataset: PackedDataset, max_token_loss: float = 0.01) -> None:
    """Stops a run whose packs lose more tokens than agreed.

    Lost are the tokens of dropped documents, those cut off by truncation, and the targets at cuts.
    What ``max_packs`` leaves out was asked for by number and does not count.

    Args:
        dataset: the packs.
        max_token_loss: largest share of the tokens that may be lost, from 0 to 1.

    Raises:
        ValueError: with the share, the limit, and every way to lose less.
    """
    stats = dataset.stats
    lost: Mapping[str, int] = {
        "dropped": stats.num_dropped_tokens,
        "truncated": stats.num_truncated_tokens,
        "targets at cuts": stats.num_targets_lost_at_cuts,
    }
    total = sum(lost.values())
    if total <= max_token_loss * stats.num_tokens:
        return
    longest = int(dataset.store.seq_lens.max())
    parts = ", ".join(f"{number:,} {name}" for name, number in lost.items() if number)
    remedies = []
    if longest > dataset.max_seq_len:
        remedies.append(f"raise max_seq_len (the longest document has {longest:,} tokens)")
        if dataset.overlong != "split" and not dataset.split_across_pack:
            remedies.append("set overlong to split, which loses one target per cut")
    if stats.num_targets_lost_at_cuts:
        if dataset.split_across_pack:
            remedies.append("leave out split_across_pack, so that only overlong documents are cut")
        elif longest <= dataset.max_seq_len:
            remedies.append("raise max_seq_len")
    remedies.append(f"allow it with max_token_loss={_rounded_up(total / stats.num_tokens):g}")
    raise ValueError(
        f"packing loses {100 * total / stats.num_tokens:.2f} % of the tokens ({parts} of "
        f"{stats.num_tokens:,}), more than max_token_loss={max_token_loss:g} allows; "
        + ", or ".join(remedies)
    )


def _rounded_up(share: float) -> float:
    """A share as two readable digits, never less than it is."""
    return float(np.ceil(share * 100) / 100)
