"""Timing, tables and the closing JSON line that all benchmarks share."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Times each candidate ``repeats`` times in turn, so that drift of the machine hits all alike.

    Args:
        candidates: name -> function to time.
        repeats: timed rounds; in each round every candidate runs once.
        warmup: untimed rounds before the first timed one.

    Returns:
        name -> seconds of each round.
    """
    for _ in range(warmup):
        for run in candidates.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of some measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Ratio of two candidates round by round, as median and spread."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a plain table that stays readable in a log file and in 80 columns."""
    cells = [[str(c) for c in row] for row in [list(header), *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for index, row in enumerate(cells):
        print(
            "  ".join(
                c.rjust(w) if i else c.ljust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        )
        if index == 0:
            print("  ".join("-" * w for w in widths))


def machine() -> dict[str, object]:
    """What a reader needs to judge a figure: processor class, threads, versions."""
    return {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def finish(name: str, result: Mapping[str, object]) -> None:
    """Prints the closing line: one JSON object with the benchmark's name, machine and result."""
    print(json.dumps({"benchmark": name, **machine(), **result}))
