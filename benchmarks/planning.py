"""Planning packs from lengths, with TRL's and torchtune's packing beside it.

    python -m benchmarks.planning            2 M lengths beside TRL; up to 20 M lengths on our own
    python -m benchmarks.planning --quick    a twentieth or less of everything; under a minute

Lengths are log-normal with a median of 180 tokens and a sigma of 0.9, clipped to the pack. TRL's
``pack_dataset(strategy="bfd")`` runs once over the whole set and once as it does by default, 1,000
samples at a time. It moves tokens as it plans, so it is given the lightest column that it accepts
and that ran fastest: one byte a token, in memory. torchtune's ``PackedDataset`` gets ready made
lists of tokens and copies them; beside it stands our plan in data order, with the same packs.

TRL comes with the extra ``bench``. The run fails if a plan of ours needs more packs than TRL's
whole set, or another number of packs than torchtune's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import numpy.typing as npt

from benchmarks.common import finish, interleaved, print_table, ratio, spread
from torchtune_packing import plan_packs
from torchtune_packing.plan import PackPlan

PACK = 3_072
LONG_PACK = 131_072
Lengths = npt.NDArray[np.int64]


def log_normal(n: int, *, median: int = 180, sigma: float = 0.9, longest: int = PACK) -> Lengths:
    """Lengths of n documents, the same on every run."""
    values = np.random.default_rng(0).lognormal(np.log(median), sigma, n)
    return values.astype(np.int64).clip(1, longest)


def trl_packing(lengths: Lengths) -> dict[str, Callable[[], int]]:
    """TRL's packing of documents of these lengths, as functions that return the number of packs."""
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))))
    values = pa.array(np.zeros(int(lengths.sum()), dtype=np.int8))
    column = pa.LargeListArray.from_arrays(offsets, values)
    dataset = datasets.Dataset(pa.table({"input_ids": column}))

    def pack(**kwargs: Any) -> int:
        kwargs |= {"keep_in_memory": True, "load_from_cache_file": False}
        return len(pack_dataset(dataset, PACK, strategy="bfd", map_kwargs=kwargs))

    return {"whole": lambda: pack(batch_size=len(lengths)), "default": pack}


def torchtune_packing(lengths: Lengths) -> Callable[[], int]:
    """Packs ready made samples in data order with torchtune; returns the number of packs."""
    from torchtune.datasets import PackedDataset

    tokens = list(range(PACK))
    samples = [{"tokens": tokens[:n], "labels": tokens[:n]} for n in lengths.tolist()]
    return lambda: len(PackedDataset(samples, max_seq_len=PACK))


def counted(run: Callable[[], int], packs: dict[str, int], name: str) -> Callable[[], None]:
    """The same function, leaving its number of packs behind."""

    def keep() -> None:
        packs[name] = run()

    return keep


def beside_peers(n: int, n_torchtune: int, repeats: int) -> dict[str, Any]:
    """Ours and TRL's on n lengths, ours and torchtune's on the first ``n_torchtune`` of them."""
    lengths = log_normal(n)
    packs: dict[str, int] = {}
    runs = {"best_fit": lambda: len(plan_packs(lengths, max_seq_len=PACK))}
    runs |= {f"TRL {name}": run for name, run in trl_packing(lengths).items()}
    plan_packs(lengths, max_seq_len=PACK)  # warm; TRL is too slow for a round that does not count
    seconds = interleaved({k: counted(run, packs, k) for k, run in runs.items()}, repeats, 0)

    few = lengths[:n_torchtune]
    runs = {
        "sequential": lambda: len(plan_packs(few, max_seq_len=PACK, strategy="sequential")),
        "torchtune": torchtune_packing(few),
    }
    seconds |= interleaved({k: counted(run, packs, k) for k, run in runs.items()}, repeats, 0)

    tokens = {name: int(lengths.sum()) for name in packs}
    tokens["sequential"] = tokens["torchtune"] = int(few.sum())
    speedup = {
        "TRL whole": ratio(seconds["TRL whole"], seconds["best_fit"]),
        "TRL default": ratio(seconds["TRL default"], seconds["best_fit"]),
        "torchtune": ratio(seconds["torchtune"], seconds["sequential"]),
    }
    rows = []
    for name in packs:
        found, fill = spread(seconds[name]), tokens[name] / packs[name] / PACK
        times = speedup.get(name)
        rows.append(
            [
                name,
                f"{n_torchtune if name in ('sequential', 'torchtune') else n:,}",
                f"{found['median']:.3f}",
                f"{found['min']:.3f}-{found['max']:.3f}",
                f"{packs[name]:,}",
                f"{fill:.5f}",
                f"{times['median']:.0f} ({times['min']:.0f}-{times['max']:.0f})" if times else "",
            ]
        )
    header = ["packing", "lengths", "seconds", "range", "packs", "fill", "ours faster by"]
    print_table(f"Packs of {PACK:,}", header, rows)
    if packs["best_fit"] > packs["TRL whole"]:
        sys.exit(f"best_fit needs {packs['best_fit']} packs, TRL {packs['TRL whole']}")
    if packs["sequential"] != packs["torchtune"]:
        sys.exit(f"sequential gives {packs['sequential']} packs, torchtune {packs['torchtune']}")
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "packs": packs,
        "fill": {name: tokens[name] / packs[name] / PACK for name in packs},
        "speedup_over_trl_whole": speedup["TRL whole"],
        "speedup_over_trl_default": speedup["TRL default"],
        "speedup_over_torchtune": speedup["torchtune"],
    }


def timed(run: Callable[[], PackPlan], repeats: int) -> tuple[list[float], PackPlan]:
    """Seconds of each of some runs, and the last plan."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        plan = run()
        seconds.append(time.perf_counter() - start)
    return seconds, plan


def on_our_own(scale: float, repeats: int, memory: bool) -> list[dict[str, Any]]:
    """Larger sets, longer packs and the other strategies; with peak memory, which takes longer."""
    million = int(1_000_000 * scale)
    short, long = {}, {"median": 20_000, "sigma": 1.0, "longest": LONG_PACK}
    cases = [
        (2 * million, short, PACK, {}),
        (2 * million, short, PACK, {"strategy": "sequential"}),
        (2 * million, short, PACK, {"split_across_pack": True}),
        (20 * million, short, PACK, {}),
        (2 * million, short, LONG_PACK, {}),
        (2 * million, long, LONG_PACK, {}),
        (20 * million, long, LONG_PACK, {}),
    ]
    rows, results = [], []
    for n, shape, pack, arguments in cases:
        lengths = log_normal(n, **shape)
        seconds, plan = timed(partial(plan_packs, lengths, max_seq_len=pack, **arguments), repeats)
        peak = None
        if memory:
            tracemalloc.start()
            plan_packs(lengths, max_seq_len=pack, **arguments)
            peak = tracemalloc.get_traced_memory()[1] / n
            tracemalloc.stop()
        label = "split" if "split_across_pack" in arguments else plan.strategy
        found, distinct = spread(seconds), len(np.unique(lengths))
        rows.append(
            [
                label,
                f"{n:,}",
                f"{distinct:,}",
                f"{pack:,}",
                f"{found['median']:.3f}",
                f"{found['min']:.3f}-{found['max']:.3f}",
                f"{len(plan):,}",
                f"{plan.fill:.5f}",
                f"{peak:.0f}" if memory else "-",
            ]
        )
        results.append(
            {
                "strategy": label,
                "lengths": n,
                "distinct": distinct,
                "max_seq_len": pack,
                "seconds": found,
                "packs": len(plan),
                "fill": plan.fill,
                "peak_bytes_per_length": peak,
            }
        )
    header = ["strategy", "lengths", "distinct", "pack", "seconds", "range", "packs", "fill"]
    print_table("Our own plans", [*header, "peak B/length"], rows)
    return results


def growth(repeats: int) -> dict[str, float]:
    """Time for twice as many documents of 50 tokens, relative to once; 2 when it grows linearly."""
    once, twice = np.full(1_000_000, 50), np.full(2_000_000, 50)
    seconds = interleaved(
        {
            "once": lambda: plan_packs(once, max_seq_len=4096),
            "twice": lambda: plan_packs(twice, max_seq_len=4096),
        },
        repeats,
    )
    found = ratio(seconds["twice"], seconds["once"])
    print(
        f"\nTwice as many documents of 50 tokens take {found['median']:.2f} times as long "
        f"({found['min']:.2f}-{found['max']:.2f})."
    )
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sets; under a minute")
    quick = parser.parse_args().quick
    n, few = (100_000, 5_000) if quick else (2_000_000, 100_000)
    peers = beside_peers(n, few, repeats=3)
    own = on_our_own(0.02 if quick else 1.0, repeats=3, memory=not quick)
    finish("planning", {"quick": quick, **peers, "own": own, "growth": growth(repeats=5)})


if __name__ == "__main__":
    main()
