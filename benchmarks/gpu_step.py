"""One training step on a GPU: padded, and packed under each backend that the GPU can run.

For every pack length it prints real tokens per second, peak memory and the time to make the mask.
The documents are the same for all: log-normal lengths (median 180), packed by best fit. ``padded``
runs them eight at a time through torchtune's own layers, padded to the longest. Each candidate gets
a fresh model with the same seeded weights, three warm-up steps (kernels compile in the first) and
then the timed ones; one model is on the GPU at a time, so that its peak memory is its own.

    python -m benchmarks.gpu_step [--quick] [--size 135m|360m|1_7b] [--lengths 2048 8192 32768]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torchtune.modules.loss import CEWithChunkedOutputLoss

from benchmarks.common import finish, print_table, ratio, spread
from torchtune_packing import collate_packed, plan_packs
from torchtune_packing.attention import InstalledAttention, install_attention
from torchtune_packing.models import smollm2

BUILDERS = {
    "135m": smollm2.smollm2_135m,
    "360m": smollm2.smollm2_360m,
    "1_7b": smollm2.smollm2_1_7b,
}
BACKENDS = ("sdpa", "flex", "varlen", "flash_attn")
PADDED_BATCH = 8
IGNORE = -100


def first_pack(s: int) -> dict[str, torch.Tensor]:
    """A full pack of documents with random tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(180), 0.87, 4 * s)), 1, min(s, 2048)).astype(int)
    plan = plan_packs(lengths, max_seq_len=s)
    # Best fit starts with the longest documents; a pack from the middle has the usual mixture.
    seq_lens = torch.tensor(np.array(plan.seq_lens(len(plan) // 2)), dtype=torch.int64)
    total = int(seq_lens.sum())
    tokens = torch.from_numpy(rng.integers(3, 49_000, total))
    labels = tokens.clone()
    labels[seq_lens.cumsum(0)[:-1]] = IGNORE
    labels[0] = IGNORE
    return {"tokens": tokens, "labels": labels, "seq_lens": seq_lens}


def build(size: str, s: int, device: torch.device) -> Any:
    """SmolLM2 in bfloat16 with seeded weights; a pack may be longer than its rotary table."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = BUILDERS[size]()
    finally:
        torch.set_default_dtype(torch.float32)
    model.max_seq_len = max(model.max_seq_len, s)
    model.set_num_output_chunks(8)
    return model.train()


def loss_of(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of torchtune's recipes, after their shift."""
    shifted = torch.hstack((labels[..., 1:], torch.full_like(labels[:, :1], IGNORE)))
    loss: torch.Tensor = CEWithChunkedOutputLoss()(logits, shifted)
    return loss


def packed_step(
    model: Any, attn: InstalledAttention, batch: dict[str, torch.Tensor]
) -> Callable[[], None]:
    """A step of one pack, mask included."""
    device = attn.device
    tokens, input_pos, labels = (batch[key].to(device) for key in ("tokens", "input_pos", "labels"))

    def step() -> None:
        mask = attn.prepare(batch["seq_lens"], tokens.shape[1])
        loss_of(model(tokens, input_pos=input_pos, mask=mask), labels).backward()
        model.zero_grad()

    return step


def padded_step(model: Any, pack: dict[str, torch.Tensor], device: torch.device) -> Any:
    """A step of the same documents, eight at a time."""
    lengths = pack["seq_lens"].tolist()
    batches = []
    for first in range(0, len(lengths), PADDED_BATCH):
        columns = (
            torch.nn.utils.rnn.pad_sequence(
                list(pack[key].split(lengths)[first : first + PADDED_BATCH]),
                batch_first=True,
                padding_value=fill,
            ).to(device)
            for key, fill in (("tokens", 2), ("labels", IGNORE))
        )
        batches.append(tuple(columns))

    def step() -> None:
        for tokens, labels in batches:
            loss_of(model(tokens), labels).backward()
        model.zero_grad()

    return step


def measure(
    step: Callable[[], None], rounds: int, device: torch.device
) -> tuple[list[float], float]:
    """Seconds of each step, and the peak memory in GiB."""
    for _ in range(3):
        step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds, torch.cuda.max_memory_allocated(device) / 2**30


def mask_milliseconds(
    attn: InstalledAttention, seq_lens: torch.Tensor, s: int, rounds: int
) -> float:
    """Median time of ``prepare``, until the device has the mask."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize(attn.device)
        start = time.perf_counter()
        attn.prepare(seq_lens, s)
        torch.cuda.synchronize(attn.device)
        times.append(1e3 * (time.perf_counter() - start))
    return spread(times[1:])["median"]


def candidate(
    name: str, pack: dict[str, torch.Tensor], s: int, size: str, rounds: int, device: torch.device
) -> dict[str, Any]:
    """What one candidate takes, or the reason why it was left out."""
    mask_ms = 0.0
    try:
        model = build(size, s, device)
        if name == "padded":
            step = padded_step(model, pack, device)
        else:
            batch = collate_packed([pack], pad_to=s, mask=None)
            attn = install_attention(model, name, device=device, dtype=torch.bfloat16)
            if attn.backend != name:
                raise ValueError(attn.reason)
            mask_ms = mask_milliseconds(attn, batch["seq_lens"], s, rounds)
            step = packed_step(model, attn, batch)
        seconds, peak = measure(step, rounds, device)
    except Exception as error:  # a kernel that cannot be built must not cost the other figures
        return {"left_out": (str(error) or type(error).__name__).splitlines()[0]}
    return {"seconds": seconds, "peak_gib": peak, "mask_ms": mask_ms}


def at_length(s: int, size: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """All candidates at one pack length; one that cannot run is listed with its reason."""
    pack = first_pack(s)
    real = int(pack["seq_lens"].sum())
    found: dict[str, Any] = {}
    for name in ("padded", *BACKENDS):
        found[name] = candidate(name, pack, s, size, rounds, device)
        # Layers and their attention refer to each other; a dead model must not count as the
        # peak memory of the next one.
        gc.collect()
        torch.cuda.empty_cache()
    rows = []
    padded = found["padded"].get("seconds")
    for name, numbers in found.items():
        if "left_out" in numbers:
            rows.append([name, "-", "-", "-", numbers["left_out"][:60]])
            continue
        faster = "-"
        if padded is not None:
            numbers["times_padded"] = ratio(padded, numbers["seconds"])
            faster = f"{numbers['times_padded']['median']:.2f}x padded"
        numbers["seconds"] = spread(numbers["seconds"])
        numbers["real_tokens_per_second"] = real / numbers["seconds"]["median"]
        rows.append(
            [
                name,
                f"{numbers['real_tokens_per_second']:,.0f}",
                f"{numbers['peak_gib']:.2f}",
                f"{numbers['mask_ms']:.2f}",
                faster,
            ]
        )
    print_table(
        f"s = {s:,}: {len(pack['seq_lens'])} documents, {real:,} real tokens",
        ["", "real tokens/s", "peak GiB", "mask ms", ""],
        rows,
    )
    return found


def main() -> None:
    """Runs the benchmark, or says that there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,048 positions, three rounds")
    parser.add_argument("--size", choices=BUILDERS, default="135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_step needs a CUDA device, and there is none.")
        finish("gpu_step", {"skipped": "no CUDA device"})
        return
    if arguments.quick:
        arguments.lengths, arguments.rounds = [2048], 3
    device = torch.device("cuda", torch.cuda.current_device())
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "size": arguments.size,
        "dtype": "bf16",
    }
    for s in arguments.lengths:
        result[str(s)] = at_length(s, arguments.size, arguments.rounds, device)
    finish("gpu_step", result)


if __name__ == "__main__":
    main()
