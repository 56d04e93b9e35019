"""How long ranks wait for each other in attention: packs in random order against balanced shares.

    python -m benchmarks.order                    20 epochs; the long-tailed set has 2 M lengths
    python -m benchmarks.order --quick            5 epochs, 100,000 lengths
    python -m benchmarks.order --lengths F.jsonl  and the lengths of a file

A simulation of the schedule, with no model. The time that a pack needs in attention is taken as the
sum of its squared document lengths; a micro-step takes as long as its slowest rank, as with sharded
weights, which all ranks gather together. The share reported is attention time that ranks compute,
out of the time that they compute or wait. Linear layers take every rank equally long on full packs,
so the share of the whole step is higher.

A step is ``ranks x accumulation x batch`` consecutive packs of the epoch's order in both cases, so
the gradient is the same; only who gets which pack differs. With one pack per rank and step nothing
is left to choose; the more packs a rank has in a step, the more there is. With one pack per rank
and micro-step (batch 1), sorting a step by cost is the best that any choice could do.

Lengths: Python's documented functions through SmolLM2's tokenizer (from characters, four to a
token, where the model is not prepared); gsm8k as a log-normal fit to its 7,473 training samples in
the same tokenizer and chat template (log mean 5.220, log deviation 0.336, 76 to 549 tokens); a
long tail, as in ``benchmarks.planning``. A line of a file is a number, an object with a ``length``,
or an object with texts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import finish, print_table
from torchtune_packing import plan_packs
from torchtune_packing.sampler import balanced_shares, epoch_order

RANKS = (8, 64)
# (accumulation, batch): packs of one rank in a step are their product.
LAYOUTS = ((1, 1), (4, 1), (1, 4), (8, 1), (16, 1), (8, 2), (4, 4))
# The hardest way to give each of 8 ranks 16 packs a step.
HEADLINE = (16, 1)
MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
CHARACTERS_PER_TOKEN = 4
Lengths = npt.NDArray[np.int64]


def docstring_lengths() -> tuple[str, Lengths]:
    """Tokens of the documented functions of this Python, and what they were counted with."""
    from torchtune_packing.datasets.docstrings import python_docstrings_dataset, stdlib_functions

    if (MODEL / "tokenizer.json").is_file():
        from torchtune_packing.models.smollm2 import smollm2_tokenizer

        dataset = python_docstrings_dataset(smollm2_tokenizer(str(MODEL)))
        return "docstrings", np.array([len(sample["tokens"]) for sample in dataset])
    texts = [f.source + f.docstring for f in stdlib_functions()]
    return "docstrings, characters / 4", from_texts(texts)


def gsm8k_like_lengths() -> Lengths:
    """Lengths like those of gsm8k's training samples."""
    values = np.random.default_rng(0).lognormal(5.220, 0.336, 7_473)
    return values.round().astype(np.int64).clip(76, 549)


def long_tailed_lengths(n: int) -> Lengths:
    """Log-normal lengths with a median of 180."""
    values = np.random.default_rng(0).lognormal(np.log(180), 0.9, n)
    return values.astype(np.int64).clip(1, 3_072)


def lengths_of_file(path: Path) -> Lengths:
    """One length per line of a JSONL file."""
    numbers, texts = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        value = json.loads(line)
        if isinstance(value, dict) and "length" in value:
            value = value["length"]
        if isinstance(value, dict):
            texts.append("".join(text for text in value.values() if isinstance(text, str)))
        else:
            numbers.append(int(value))
    return np.array(numbers) if numbers else from_texts(texts)


def from_texts(texts: list[str]) -> Lengths:
    """Lengths of texts in tokens of the model, or guessed from their characters."""
    if (MODEL / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        return np.array([len(found.ids) for found in tokenizer.encode_batch_fast(texts)])
    return np.array([max(1, len(text) // CHARACTERS_PER_TOKEN) for text in texts])


def simulate(
    lengths: Lengths, pack: int, ranks: int, accumulation: int, batch: int, epochs: int
) -> dict[str, Any] | None:
    """Shares of attention time not spent waiting; None when an epoch holds no step."""
    per_step = ranks * accumulation * batch
    computed, waited_for = 0.0, {"random": 0.0, "balanced": 0.0}
    steps, seconds = 0, 0.0
    for epoch in range(epochs):
        plan = plan_packs(lengths, max_seq_len=pack, epoch=epoch)
        num_steps = len(plan) // per_step
        if not num_steps:
            return None
        order = epoch_order(len(plan), seed=0, epoch=epoch)[: num_steps * per_step]
        costs = plan.attention_cost[order].reshape(num_steps, per_step)
        start = time.perf_counter()
        sizes = {"batch_size": batch, "accumulation": accumulation, "world_size": ranks}
        shares = balanced_shares(costs, **sizes).reshape(num_steps, per_step)
        seconds += time.perf_counter() - start
        computed += float(costs.sum())
        steps += num_steps
        for name, dealt in (
            ("random", costs),
            ("balanced", np.take_along_axis(costs, shares, axis=1)),
        ):
            of_ranks = dealt.reshape(num_steps, accumulation, ranks, batch).sum(axis=-1)
            waited_for[name] += ranks * float(of_ranks.max(axis=-1).sum())
    return {
        "ranks": ranks,
        "accumulation": accumulation,
        "batch": batch,
        "packs": len(plan),
        "steps": steps,
        "random": computed / waited_for["random"],
        "balanced": computed / waited_for["balanced"],
        "microseconds_per_step": 1e6 * seconds / steps,
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs, a smaller long tail")
    parser.add_argument("--lengths", type=Path, help="JSONL file with a length or texts per line")
    parser.add_argument("--pack", type=int, default=2_048, help="max_seq_len for --lengths")
    arguments = parser.parse_args()
    epochs = 5 if arguments.quick else 20

    name, docstrings = docstring_lengths()
    sets = {
        name: (docstrings[docstrings <= 2_048], 2_048, epochs),
        "gsm8k-like": (gsm8k_like_lengths(), 2_048, epochs),
        "long tail": (long_tailed_lengths(100_000 if arguments.quick else 2_000_000), 3_072, 1),
    }
    if arguments.lengths:
        found = lengths_of_file(arguments.lengths)
        sets[arguments.lengths.name] = (found[found <= arguments.pack], arguments.pack, epochs)

    results: dict[str, list[dict[str, Any]]] = {}
    for name, (lengths, pack, rounds) in sets.items():
        results[name], rows = [], []
        for ranks in RANKS:
            for accumulation, batch in LAYOUTS:
                found = simulate(lengths, pack, ranks, accumulation, batch, rounds)
                row = [ranks, accumulation, batch, ranks * accumulation * batch]
                if found is None:
                    rows.append([*row, "-", "-", "-", "-"])
                    continue
                results[name].append(found)
                shares = [f"{100 * found[kind]:.1f} %" for kind in ("random", "balanced")]
                rows.append(
                    [*row, found["steps"], *shares, f"{found['microseconds_per_step']:.0f}"]
                )
        packs = len(plan_packs(lengths, max_seq_len=pack))
        title = f"{name}: {len(lengths):,} documents, {packs:,} packs of {pack:,}"
        header = ["ranks", "accumulation", "batch", "packs/step", "steps", "random", "balanced"]
        print_table(title, [*header, "us/step"], rows)

    headline = {
        name: {kind: found[kind] for kind in ("random", "balanced")}
        for name, layouts in results.items()
        for found in layouts
        if (found["ranks"], found["accumulation"], found["batch"]) == (RANKS[0], *HEADLINE)
    }
    for name, found in headline.items():
        print(
            f"{name}, {RANKS[0]} ranks, accumulation {HEADLINE[0]}, batch {HEADLINE[1]}: "
            f"{100 * found['balanced']:.1f} % of attention time not spent waiting when balanced, "
            f"{100 * found['random']:.1f} % in random order"
        )
    finish("order", {"quick": arguments.quick, "headline": headline, "sets": results})


if __name__ == "__main__":
    main()
