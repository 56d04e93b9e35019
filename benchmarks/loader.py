"""Batches a second of the loader, and what it holds while it prefetches.

Ours is ``PackedDataset`` with ``collate_packed(mask=None)``: tokens, labels, positions and lengths;
the mask is made later, on the device. Beside it torchtune's ``PackedDataset`` with its
``padded_collate_packed``, which makes the mask in the loader. ``with mask`` adds the bool mask to
ours, to compare like with like.

    python -m benchmarks.loader [--quick]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchtune.data import padded_collate_packed
from torchtune.datasets import PackedDataset as TorchtunePackedDataset

from benchmarks.common import finish, interleaved, print_table, ratio, spread
from torchtune_packing import PackedDataset, collate_packed

MAX_SEQ_LEN = 8192
BATCH_SIZE = 2


class Samples:
    """Log-normal lengths (median 180), random tokens."""

    def __init__(self, num_samples: int, max_seq_len: int) -> None:
        rng = np.random.default_rng(0)
        lengths = np.exp(rng.normal(np.log(180), 0.87, num_samples))
        self.lengths = np.clip(lengths, 1, max_seq_len).astype(int).tolist()
        self.tokens = rng.integers(0, 32_000, 2 * max_seq_len).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        start = index % MAX_SEQ_LEN
        tokens = self.tokens[start : start + self.lengths[index]]
        return {"tokens": tokens, "labels": tokens}


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a batch."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(tensor_bytes(item) for item in value.values())
    return 0


def batches_per_second(num_samples: int, repeats: int) -> dict[str, Any]:
    """Times a pass over the same number of batches of each."""
    samples = Samples(num_samples, MAX_SEQ_LEN)
    ours = PackedDataset(samples, max_seq_len=MAX_SEQ_LEN)
    theirs = TorchtunePackedDataset(samples, max_seq_len=MAX_SEQ_LEN)
    num_packs = min(len(ours), len(theirs)) // BATCH_SIZE * BATCH_SIZE
    num_batches = num_packs // BATCH_SIZE

    def walk(ds: Any, collate: Any) -> None:
        order = torch.randperm(num_packs, generator=torch.Generator().manual_seed(0)).tolist()
        loader = DataLoader(ds, batch_size=BATCH_SIZE, sampler=order, collate_fn=collate)
        for _ in loader:
            pass

    packed = functools.partial(collate_packed, mask=None, pad_to=MAX_SEQ_LEN)
    masked = functools.partial(collate_packed, mask="bool", pad_to=MAX_SEQ_LEN)
    candidates = {
        "ours": lambda: walk(ours, packed),
        "ours, with mask": lambda: walk(ours, masked),
        "torchtune": lambda: walk(theirs, padded_collate_packed),
    }
    seconds = interleaved(candidates, repeats)
    rates = {name: [num_batches / value for value in values] for name, values in seconds.items()}
    rows = [
        [
            name,
            f"{spread(values)['median']:.1f}",
            f"{ratio(values, rates['torchtune'])['median']:.1f}",
        ]
        for name, values in rates.items()
    ]
    title = f"{num_batches} batches of {BATCH_SIZE} packs of {MAX_SEQ_LEN:,}, one process"
    print_table(title, ["", "batches/s", "of torchtune's"], rows)
    return {
        "batches": num_batches,
        "batches_per_second": {name: spread(values) for name, values in rates.items()},
        "ours_over_torchtune": ratio(rates["ours"], rates["torchtune"]),
        "ours_with_mask_over_torchtune": ratio(rates["ours, with mask"], rates["torchtune"]),
    }


def prefetched_bytes(max_seq_len: int, num_micro_batches: int) -> dict[str, Any]:
    """What a loader holds that is ahead by so many micro-batches of one pack."""
    samples = Samples(num_micro_batches * max_seq_len // 250, max_seq_len)
    ds = PackedDataset(samples, max_seq_len=max_seq_len)
    collate = functools.partial(collate_packed, mask=None, pad_to=max_seq_len)
    # All that two workers hand over while they are ahead by so many batches, none let go.
    loader = DataLoader(ds, num_workers=2, prefetch_factor=num_micro_batches, collate_fn=collate)
    waiting = list(itertools.islice(loader, num_micro_batches))
    assert len(waiting) == num_micro_batches
    held: dict[str, int] = {}
    for batch in waiting:
        for name, value in batch.items():
            held[name] = held.get(name, 0) + tensor_bytes(value)
    dense = num_micro_batches * max_seq_len**2
    rows: list[list[object]] = [[name, f"{value / 1e6:.2f}"] for name, value in held.items()]
    rows += [
        ["all", f"{sum(held.values()) / 1e6:.2f}"],
        ["a (n, 1, s, s) mask", f"{dense / 1e6:,.0f}"],
    ]
    title = f"{num_micro_batches} micro-batches of {max_seq_len:,} waiting in the loader"
    print_table(title, ["", "MB"], rows)
    return {"bytes": held, "all_bytes": sum(held.values()), "dense_mask_bytes": dense}


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    result = {
        **batches_per_second(600 if quick else 3000, 3 if quick else 7),
        "prefetch": prefetched_bytes(32_768, 32),
    }
    finish("loader", result)


if __name__ == "__main__":
    main()
