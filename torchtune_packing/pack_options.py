"""Which pack length and which strategy to take: every candidate planned, the best one explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from torchtune_packing.cost_model import CostModel, pack_work, padded_work
from torchtune_packing.dataset import PackedDataset
from torchtune_packing.plan import plan_packs

__all__ = ["Option", "choose", "option_lines", "pack_options"]

#: Options closer than this are the same.
_SAME = 0.02


@dataclass(frozen=True)
class Option:
    """One way to pack, and what it would come to.

    Attributes:
        strategy: as in the config.
        max_seq_len: as in the config.
        packs: packs of an epoch; 0 when it cannot be planned.
        fill: real tokens over capacity.
        steps_per_epoch: optimizer steps.
        lost: share of the tokens dropped or truncated.
        relative_time: predicted time of an epoch over that of padded batches; None without a model.
        problem: why it is out of the question, or "".
    """

    strategy: str
    max_seq_len: int
    packs: int
    fill: float
    steps_per_epoch: int
    lost: float
    relative_time: float | None
    problem: str

    def as_dict(self) -> dict[str, Any]:
        """The same as a plain dict, ready for JSON."""
        return asdict(self)


def pack_options(
    dataset: PackedDataset,
    max_seq_lens: Sequence[int],
    strategies: Sequence[str],
    *,
    batch_size: int = 1,
    packs_per_step: int = 1,
    padded_batch_size: int = 8,
    max_token_loss: float = 0.01,
    model_max_seq_len: int | None = None,
    cost: CostModel | None = None,
    static_shapes: bool = False,
) -> list[Option]:
    """Plans every candidate, from lengths alone.

    Args:
        dataset: its store and its settings other than length and strategy.
        max_seq_lens: candidates.
        strategies: candidates.
        batch_size: packs in a micro-batch.
        packs_per_step: packs of an optimizer step.
        padded_batch_size: documents of the padded batches to compare with.
        max_token_loss: share of tokens that may be lost.
        model_max_seq_len: positions of the model; a document may not be longer.
        cost: predicts times.
        static_shapes: rows are always ``max_seq_len`` long.
    """
    lengths = dataset.store.seq_lens
    padded = None
    if cost is not None:
        padded = cost.seconds(padded_work(lengths, batch_size=padded_batch_size))
    options = []
    for max_seq_len in max_seq_lens:
        for strategy in strategies:
            if dataset.overlong == "error" and not dataset.split_across_pack:
                overlong = int(np.count_nonzero(lengths > max_seq_len))
                if overlong:
                    problem = f"{overlong:,} documents too long"
                    options.append(Option(strategy, max_seq_len, 0, 0.0, 0, 0.0, None, problem))
                    continue
            plan = plan_packs(
                lengths,
                max_seq_len=max_seq_len,
                strategy=strategy,
                overlong=dataset.overlong,
                split_across_pack=dataset.split_across_pack,
                max_packs=dataset.max_packs,
                seed=dataset.seed,
            )
            lost = (plan.num_dropped_tokens + plan.num_truncated_tokens) / int(lengths.sum())
            longest = int(plan.lengths.max())
            problem = ""
            if lost > max_token_loss:
                problem = f"loses {100 * lost:.1f} % of the tokens"
            elif len(plan) < packs_per_step:
                problem = f"fewer packs than one step needs ({packs_per_step:,})"
            elif model_max_seq_len is not None and longest > model_max_seq_len:
                problem = f"the model has {model_max_seq_len:,} positions"
            relative = None
            if cost is not None and padded:
                work = pack_work(plan, batch_size=batch_size, static_shapes=static_shapes)
                relative = cost.seconds(work) / padded
            options.append(
                Option(
                    strategy,
                    max_seq_len,
                    len(plan),
                    plan.fill,
                    len(plan) // packs_per_step,
                    lost,
                    relative,
                    problem,
                )
            )
    return options


def choose(options: Sequence[Option], error: float = 0.0) -> tuple[Option | None, str]:
    """The option to take, and one sentence that says why.

    The least predicted time wins (the best fill, where no time was predicted). Others count as
    equal within 2 %, or within the error of the prediction where that is more. Among equals: more
    optimizer steps, since short packs need less memory and give more updates; then best_fit, which
    has new neighbours every epoch.

    Args:
        options: the candidates.
        error: relative error of the predicted times.
    """
    same = max(_SAME, error)
    possible = [option for option in options if not option.problem]
    if not possible:
        return None, "none of them works; raise max_seq_len or lower the packs of a step"

    def badness(option: Option) -> float:
        return 1 / option.fill if option.relative_time is None else option.relative_time

    least = min(map(badness, possible))
    close = [option for option in possible if badness(option) <= least * (1 + same)]
    taken = min(close, key=lambda o: (o.max_seq_len, o.strategy != "best_fit"))
    if taken.relative_time is not None:
        reason = f"{taken.relative_time:.2f} of the time of padded batches"
    else:
        reason = f"fill {100 * taken.fill:.2f} %"
    if len(close) == 1:
        reason += ", the least of all" if taken.relative_time is not None else ", the best of all"
    else:
        reason += (
            f"; of the {len(close)} within {100 * same:.0f} % of the best this one has the "
            "shortest packs: least memory, most steps"
        )
    return taken, reason


def option_lines(options: Sequence[Option], taken: Option | None) -> list[str]:
    """The options as a table of at most 80 columns; ``>`` marks the one to take."""
    head = ("strategy", "max_seq_len", "packs", "fill", "steps/epoch", "time/padded")
    lines = ["  {:<11}{:>12}{:>11}{:>10}{:>13}{:>13}".format(*head)]
    for option in options:
        mark = ">" if option is taken else " "
        start = f"{mark} {option.strategy:<11}{option.max_seq_len:>12,}"
        if not option.packs:
            lines.append(f"{start}  {option.problem}")
            continue
        time = "-" if option.relative_time is None else f"{option.relative_time:.2f}"
        lines.append(
            f"{start}{option.packs:>11,}{100 * option.fill:>8.2f} %{option.steps_per_epoch:>13,}"
            f"{time:>13}"
        )
        if option.problem:
            lines.append(f"      not possible: {option.problem}")
    return lines
