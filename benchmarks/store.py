"""Building and opening token stores, with torchtune's ``PackedDataset`` beside it.

Every measurement runs in a process of its own, whose memory (and that of its workers) is sampled
from outside: the sum of ``Pss_Anon`` in ``/proc/<pid>/smaps_rollup``, so pages that a fork shares
count once and the page cache does not count at all.

    python -m benchmarks.store            200,000 synthetic samples on disk
    python -m benchmarks.store --full     and 2,280,000 (600 M tokens, 4.8 GB on disk, minutes)
    python -m benchmarks.store --quick    20,000; under a minute
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import finish, print_table, ratio, spread

MAX_SEQ_LEN = 3072


class Synthetic:
    """Samples with log-normal lengths (median 180, mean about 263), tokens ready made.

    Nothing is stored per sample, so the source adds nothing to the memory that is measured.
    """

    def __init__(self, num_samples: int) -> None:
        rng = np.random.default_rng(0)
        self.num_samples = num_samples
        lengths = np.exp(rng.normal(np.log(180), 0.87, 1 << 16))
        self.lengths = np.clip(lengths, 1, MAX_SEQ_LEN).astype(int).tolist()
        self.tokens = rng.integers(0, 32_000, 2 * MAX_SEQ_LEN).tolist()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        length = self.lengths[(index * 40_503) & 0xFFFF]
        start = index % MAX_SEQ_LEN
        tokens = self.tokens[start : start + length]
        return {"tokens": tokens, "labels": tokens}


def tokenizing_source(num_samples: int) -> Any:
    """Python's documented functions through a byte-level BPE that is trained on the spot."""
    import ast
    import sysconfig

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                texts.append(ast.get_source_segment(source, node) or "")
    texts = [text for text in texts if 20 < len(text) < 4000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8000, show_progress=False)
    tokenizer.train_from_iterator(texts[:2000], trainer)

    class Texts:
        def __len__(self) -> int:
            return num_samples

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            if index >= num_samples:
                raise IndexError(index)
            tokens = tokenizer.encode(texts[index % len(texts)]).ids
            return {"tokens": tokens, "labels": tokens}

    return Texts()


# ---- what the measured processes do -------------------------------------------------------------


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def child_ours_in_memory(num_samples: int, folder: str) -> dict[str, Any]:
    """Our data set in memory, from samples to packs."""
    from torchtune_packing import PackedDataset

    source = Synthetic(num_samples)
    ready()
    seconds, ds = _timed(lambda: PackedDataset(source, max_seq_len=MAX_SEQ_LEN))
    return {"seconds": seconds, "packs": len(ds), "fill": ds.plan.fill}


def child_torchtune(num_samples: int, folder: str) -> dict[str, Any]:
    """The data set of torchtune on the same samples."""
    from torchtune.datasets import PackedDataset

    source = Synthetic(num_samples)
    ready()
    seconds, ds = _timed(lambda: PackedDataset(source, max_seq_len=MAX_SEQ_LEN))
    tokens = sum(source.lengths[(index * 40_503) & 0xFFFF] for index in range(num_samples))
    return {"seconds": seconds, "packs": len(ds), "fill": tokens / (len(ds) * MAX_SEQ_LEN)}


def child_build(num_samples: int, folder: str, num_workers: int = 2) -> dict[str, Any]:
    """A store on disk, built by workers."""
    from torchtune_packing.store import TokenStore

    source = Synthetic(num_samples)
    ready()
    seconds, store = _timed(
        lambda: TokenStore.build(folder, source, num_workers=num_workers, progress=False)
    )
    size = sum(file.stat().st_size for file in Path(folder).iterdir())
    tokens = store.accounting.num_tokens
    return {"seconds": seconds, "tokens": tokens, "bytes_per_token": size / tokens}


def child_build_here(num_samples: int, folder: str) -> dict[str, Any]:
    """A store on disk, built without workers."""
    return child_build(num_samples, folder, num_workers=0)


def child_open(num_samples: int, folder: str) -> dict[str, Any]:
    """A second start, or another rank: open the store, plan, take packs."""
    import torch

    from torchtune_packing import PackedDataset

    torch.zeros(1)
    source = Synthetic(num_samples)
    cache = Path(folder)
    ready()
    seconds, ds = _timed(
        lambda: PackedDataset(
            source, max_seq_len=MAX_SEQ_LEN, cache_dir=cache.parent, cache_key=cache.name
        )
    )
    for index in range(min(200, len(ds))):
        ds[index]
    steady()
    return {"seconds": seconds, "packs": len(ds)}


def child_tokenize(num_samples: int, folder: str) -> dict[str, Any]:
    """The bare loop over a source that tokenizes, and our builds of it, in turn."""
    from torchtune_packing.store import TokenStore

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = tokenizing_source(num_samples)
    ready()

    def bare() -> None:
        for index in range(len(source)):
            source[index]

    def build(num_workers: int) -> Callable[[], Any]:
        return lambda: TokenStore.build(
            Path(folder), source, num_workers=num_workers, progress=False
        )

    candidates = {"bare": bare, "none": build(0), "one": build(1), "two": build(2)}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    processor: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(3):
        for name, run in candidates.items():
            before = sum(os.times()[:4])
            seconds[name].append(_timed(run)[0])
            processor[name].append(sum(os.times()[:4]) - before)
    return {"seconds_of": seconds, "processor_seconds_of": processor}


# ---- measuring ----------------------------------------------------------------------------------


def ready() -> None:
    """Tells the measuring process that imports are done; it notes the bare memory."""
    print("READY", flush=True)
    sys.stdin.readline()


def steady() -> None:
    """Lets the measuring process note the memory that stays."""
    print("STEADY", flush=True)
    sys.stdin.readline()


def anonymous_bytes(pid: int) -> int:
    """Pss_Anon of a process and all its descendants."""
    total = 0
    pending = [pid]
    while pending:
        process = pending.pop()
        try:
            with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as file:
                total += sum(
                    1024 * int(line.split()[1]) for line in file if line.startswith("Pss_Anon")
                )
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children", encoding="ascii") as file:
                    pending += [int(child) for child in file.read().split()]
        except (OSError, ValueError):
            continue
    return total


def measure(name: str, num_samples: int, folder: Path) -> dict[str, Any]:
    """Runs one child to its end while sampling its memory."""
    command = [sys.executable, "-m", "benchmarks.store", "--child", name]
    command += ["--samples", str(num_samples), "--folder", str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    bare = peak = stays = 0
    over = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(0.1):
            if bare:
                peak = max(peak, anonymous_bytes(process.pid))

    sampler = threading.Thread(target=sample)
    sampler.start()
    line = ""
    for line in process.stdout:
        if line.strip() == "READY":
            bare = anonymous_bytes(process.pid)
        elif line.strip() == "STEADY":
            stays = anonymous_bytes(process.pid)
        else:
            continue
        process.stdin.write("\n")
        process.stdin.flush()
    over.set()
    sampler.join()
    if process.wait():
        assert process.stderr is not None
        raise SystemExit(f"{name} failed:\n{process.stderr.read()}")
    result: dict[str, Any] = json.loads(line)
    result |= {"bare_mb": bare / 1e6, "peak_mb": (peak - bare) / 1e6}
    if stays:
        result["steady_mb"] = (stays - bare) / 1e6
    return result


def compare_in_memory(num_samples: int, rounds: int, scratch: Path) -> dict[str, Any]:
    """Ours against torchtune's, tokens ready made."""
    runs: dict[str, list[dict[str, Any]]] = {"ours_in_memory": [], "torchtune": []}
    for _ in range(rounds):
        for name, results in runs.items():
            results.append(measure(name, num_samples, scratch))
    seconds = {name: [run["seconds"] for run in results] for name, results in runs.items()}
    rows = [
        [
            name,
            f"{spread(seconds[name])['median']:.2f}",
            f"{max(run['peak_mb'] for run in results):.0f}",
            f"{results[0]['packs']:,}",
            f"{results[0]['fill']:.4f}",
        ]
        for name, results in runs.items()
    ]
    title = f"{num_samples:,} samples to packs of {MAX_SEQ_LEN:,} in memory"
    print_table(title, ["", "seconds", "peak MB", "packs", "fill"], rows)
    return {
        "samples": num_samples,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "torchtune_over_ours": ratio(seconds["torchtune"], seconds["ours_in_memory"]),
        "peak_mb": {name: max(run["peak_mb"] for run in results) for name, results in runs.items()},
    }


def measure_store(sizes: list[int], scratch: Path) -> list[dict[str, Any]]:
    """Builds on disk with two workers and with none, then opens like a second start."""
    found, rows = [], []
    for size in sizes:
        folder = scratch / f"store-{size}"
        built = measure("build", size, folder)
        opened = measure("open", size, folder)
        shutil.rmtree(folder)
        alone = measure("build_here", size, folder)
        shutil.rmtree(folder)
        found.append(
            {
                "samples": size,
                "tokens": built["tokens"],
                "build_seconds": built["seconds"],
                "build_peak_mb": built["peak_mb"],
                "build_without_workers_seconds": alone["seconds"],
                "build_without_workers_peak_mb": alone["peak_mb"],
                "bytes_per_token": built["bytes_per_token"],
                "open_and_plan_seconds": opened["seconds"],
                "extra_rank_steady_mb": opened["steady_mb"],
                "extra_rank_peak_mb": opened["peak_mb"],
            }
        )
        for name, run in (("2 workers", built), ("no workers", alone)):
            rows.append(
                [
                    f"{size:,} build, {name}",
                    f"{run['seconds']:.1f}",
                    f"{run['peak_mb']:.0f}",
                    f"{run['bytes_per_token']:.3f}",
                ]
            )
        rows.append(
            [
                f"{size:,} open and plan",
                f"{opened['seconds']:.2f}",
                f"{opened['peak_mb']:.0f} ({opened['steady_mb']:.0f} stay)",
                "",
            ]
        )
    print_table("Store on disk", ["", "seconds", "anonymous MB", "bytes/token"], rows)
    return found


def compare_tokenizing(num_samples: int, scratch: Path) -> dict[str, Any]:
    """The bare loop over a tokenizing source against builds with no, one and two workers."""
    found = measure("tokenize", num_samples, scratch / "tokenized")
    seconds, processor = found["seconds_of"], found["processor_seconds_of"]
    rows = [
        [
            {"bare": "bare loop", "none": "build, no workers"}.get(name, f"build, {name}"),
            f"{spread(values)['median']:.2f}",
            f"{ratio(values, seconds['bare'])['median']:.2f}",
            f"{ratio(processor[name], processor['bare'])['median']:.2f}",
        ]
        for name, values in seconds.items()
    ]
    title = f"{num_samples:,} samples that are tokenized"
    # Processor time, of all processes together, also means something on a busy machine.
    print_table(title, ["", "seconds", "of bare loop", "processor time of it"], rows)
    return {
        "samples": num_samples,
        **{name: ratio(values, seconds["bare"]) for name, values in seconds.items()},
        "processor_time": {
            name: ratio(values, processor["bare"]) for name, values in processor.items()
        },
    }


def main() -> None:
    """Runs the benchmark, or one measured process of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for stores (5 GB)")
    parser.add_argument("--part", action="append", choices=["in_memory", "store", "tokenizing"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        result = globals()[f"child_{chosen.child}"](chosen.samples, chosen.folder)
        print(json.dumps(result), flush=True)
        return
    sizes = [20_000] if chosen.quick else [200_000] + [2_280_000] * chosen.full
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as scratch:
        folder = Path(scratch)
        parts: dict[str, Callable[[], Any]] = {
            "in_memory": lambda: compare_in_memory(100_000, 1 if chosen.quick else 3, folder),
            "store": lambda: measure_store(sizes, folder),
            "tokenizing": lambda: compare_tokenizing(4_000 if chosen.quick else 20_000, folder),
        }
        result = {
            name: run() for name, run in parts.items() if not chosen.part or name in chosen.part
        }
    finish("store", result)


if __name__ == "__main__":
    main()
