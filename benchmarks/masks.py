"""Building masks from document lengths, with torch's and torchtune's builders beside ours.

Times are of one call, after one untimed call. Ratios are taken in turns with the peers, each of
which leaves cold caches behind; ours is timed back to back besides. Memory is what the process
gains at its highest during one more call: the peak of its resident memory, reset before the call,
less what it held then. The library's ``create_block_mask`` runs uncompiled, as torchtune 0.6.1
calls it.

    python -m benchmarks.masks            peers up to 32,768 positions (about 12 GB, two minutes)
    python -m benchmarks.masks --quick    peers up to 8,192 positions
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torchtune.modules.attention_utils import create_block_causal_mask

from benchmarks.common import finish, interleaved, print_table, ratio, spread
from torchtune_packing.masks import block_causal_block_mask, block_causal_mask, document_ids

#: Positions and block size; at a million positions the index tensors of blocks of 128 take 1 GiB.
SIZES = ((2_048, 128), (8_192, 128), (32_768, 128), (131_072, 128), (1_048_576, 512))
# Bytes per pair of positions that the peers were seen to take, to leave out what does not fit.
PEER_BYTES = 12


def lengths_of(s: int) -> torch.Tensor:
    """One row of documents with log-normal lengths (median 180), int32 ``[1, d]``, summing to s."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.empty(s // 50 + 10).log_normal_(5.2, 0.87, generator=generator)
    ends = draws.long().clamp(min=1).cumsum(0)
    ends = torch.cat([ends[ends < s], torch.tensor([s])])
    return ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).int()[None]


def peak_megabytes(run: Callable[[], Any]) -> float | None:
    """Resident memory that a call adds at its peak, in MB; None where /proc cannot tell."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        kept = run()
        peak = _status("VmHWM")
        del kept
    except (OSError, AttributeError):
        return None
    return max(peak - before, 0) / 1e6


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def available_bytes() -> float:
    """Memory that may be used without swapping; endless where /proc cannot tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next(int(x.split()[1]) * 1024.0 for x in lines if x.startswith("MemAvailable"))


def library_block_mask(seq_lens: torch.Tensor, s: int) -> Any:
    """What torchtune's packed collate does, on the CPU."""
    ids = document_ids(seq_lens, s)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    return create_block_mask(mask_mod, 1, None, s, s, device="cpu")


def measure(
    s: int, block_size: int, *, with_peers: bool, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Seconds of each call, and MB at the peak, by builder."""
    seq_lens = lengths_of(s)
    rows = list(seq_lens)
    builders: dict[str, Callable[[], Any]] = {
        "block_mask": lambda: block_causal_block_mask(seq_lens, s, block_size=block_size)
    }
    if with_peers:
        builders["create_block_mask"] = lambda: library_block_mask(seq_lens, s)
    if s <= 32_768:
        builders["bool_mask"] = lambda: block_causal_mask(seq_lens, s)
    if with_peers:
        builders["torchtune_bool_mask"] = lambda: create_block_causal_mask(rows)
    seconds = interleaved(builders, repeats)
    seconds["block_mask_alone"] = interleaved({"": builders["block_mask"]}, 20)[""]
    return seconds, {name: peak_megabytes(run) for name, run in builders.items()}


def _cell(seconds: list[float] | None, megabytes: float | None) -> str:
    if seconds is None:
        return "-"
    memory = "" if megabytes is None else f" {megabytes:,.1f} MB"
    return f"{spread(seconds)['median'] * 1e3:,.2f} ms{memory}"


def _times(ours: list[float], peer: list[float] | None) -> str:
    if peer is None:
        return "-"
    found = ratio(peer, ours)
    return f"{found['median']:,.0f} ({found['min']:,.0f}-{found['max']:,.0f})"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="peers up to 8,192 positions only")
    quick = parser.parse_args().quick
    torch.set_num_threads(2)

    result: list[dict[str, Any]] = []
    flex_rows, bool_rows, loader_rows = [], [], []
    for s, block_size in SIZES:
        fits = s <= (8_192 if quick else 32_768) and available_bytes() > PEER_BYTES * s * s
        repeats = 3 if s == 32_768 and fits else 9
        seconds, memory = measure(s, block_size, with_peers=fits, repeats=repeats)
        ours, library = seconds["block_mask"], seconds.get("create_block_mask")
        flex_rows.append(
            [
                f"{s:,}",
                block_size,
                _cell(seconds["block_mask_alone"], memory["block_mask"]),
                f"{spread(ours)['median'] * 1e3:,.2f} ms",
                _cell(library, memory.get("create_block_mask")),
                _times(ours, library),
            ]
        )
        if "bool_mask" in seconds:
            dense, theirs = seconds["bool_mask"], seconds.get("torchtune_bool_mask")
            bool_rows.append(
                [
                    f"{s:,}",
                    _cell(dense, memory["bool_mask"]),
                    _cell(theirs, memory.get("torchtune_bool_mask")),
                    _times(dense, theirs),
                ]
            )
        documents = lengths_of(s).numel()
        ours_bytes, nemo_bytes = 32 * (2 * 8 * s + 4 * documents), 32 * s * s
        loader_rows.append([f"{s:,}", f"{ours_bytes / 1e6:,.1f} MB", f"{nemo_bytes / 1e6:,.0f} MB"])
        result.append(
            {
                "s": s,
                "block_size": block_size,
                "seconds": {name: spread(values) for name, values in seconds.items()},
                "peak_mb": memory,
                "create_block_mask_over_ours": None if library is None else ratio(library, ours),
            }
        )
    print_table(
        "BlockMask of one row",
        ["positions", "block", "ours", "in turn", "create_block_mask", "times"],
        flex_rows,
    )
    print_table(
        "Bool mask of one row", ["positions", "ours", "torchtune 0.6.1", "times"], bool_rows
    )
    print_table(
        "Arithmetic: what a loader holds for 32 micro-batches of one row",
        ["positions", "tokens, labels, seq_lens", "bool (n, 1, s, s)"],
        loader_rows,
    )
    finish("masks", {"quick": quick, "sizes": result})


if __name__ == "__main__":
    main()
