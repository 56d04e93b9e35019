"""Time, real tokens a second and peak memory of three ways to batch the same samples.

============  ==================================================================================
padded        a batch of samples, each padded to the longest of the batch, plain causal attention
padding-free  the same batch of samples as one row without padding (``collate_flattened``)
packed        the same samples in packs of the config's ``max_seq_len`` (``collate_packed``)
============  ==================================================================================

A config gives the model, the data set, the device and the dtype. Every method trains on the same
samples, forward and backward, with the same loss on trained rows only, so that nothing but the
batches differs; all gradients are dropped after each batch. Each method runs in a process of its
own, which makes its peak memory its own, and the methods take turns, round by round.

    python -m benchmarks.padding_vs_packing [--quick] [--config configs/smollm2/135M_full.yaml]
        [--data config qa] [--samples 96] [--batch-size 8] [--rounds 3] [--nproc-per-node 1]

``--data qa`` replaces the data of the config by questions and answers of short, even lengths, where
padding wastes least. On several GPUs (FSDP2, weights from the config's checkpoint):

    python -m benchmarks.padding_vs_packing --config configs/mistral/7B_full_orcamath.yaml
        --data config --samples 4096 --nproc-per-node 8
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, utils
from torchtune.data import padded_collate_sft

from benchmarks.common import finish, print_table, ratio, spread
from torchtune_packing import PackedDataset, collate_flattened, collate_packed
from torchtune_packing.attention import install_attention
from torchtune_packing.loss import TrainedRows, loss_rows, sum_cross_entropy
from torchtune_packing.store import TokenStore
from torchtune_packing.training import model_setup
from torchtune_packing.training.config_values import resolve_dtype
from torchtune_packing.training.data import SampleDataset
from torchtune_packing.training.loading import EvenBatches
from torchtune_packing.training.metrics import peak_memory
from torchtune_packing.training.parallel import Ranks

METHODS = ("padded", "padding-free", "packed")
IGNORE = -100
REPO = Path(__file__).resolve().parent.parent


class ShortAnswers:
    """Questions and answers of 56 to 72 tokens, random ids, the answer's 12 to 16 trained."""

    def __init__(self, tokenizer: Any, *, num_samples: int = 4096) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        draw = random.Random(index)
        tokens = [draw.randrange(10, 20_000) for _ in range(draw.randint(56, 72))]
        prompt = len(tokens) - draw.randint(12, 16)
        return {"tokens": tokens, "labels": [IGNORE] * prompt + tokens[prompt:]}


def samples_of(cfg: DictConfig, data: str, count: int) -> TokenStore:
    """The first samples of the config's data set (or of the questions), as documents."""
    tokenizer = config.instantiate(cfg.tokenizer)
    node = cfg.dataset
    if data == "qa":
        node = {"_component_": "benchmarks.padding_vs_packing.ShortAnswers"}
    elif "source" in node:
        node = node.source
    source = config.instantiate(OmegaConf.create(node), tokenizer)
    picked = [source[i] for i in range(min(count, len(source)))]
    return TokenStore.from_samples(picked, progress=False)


def batches_of(
    method: str, store: TokenStore, batch_size: int, cfg: DictConfig, ranks: Ranks
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """This rank's batches with aligned labels, and the real tokens of each row.

    Every sample is in one batch; a rank that has run out repeats its last one, which all count
    alike, so that ranks stay together.
    """
    if method == "packed":
        packs = PackedDataset(store, max_seq_len=cfg.dataset.max_seq_len)
        size, items = cfg.batch_size, packs
    else:
        size, items = batch_size, SampleDataset(store)
    for indices in EvenBatches(
        len(items), batch_size=size, rank=ranks.rank, world_size=ranks.world_size
    ):
        batch = [items[i] for i in indices]
        lengths = [len(item["tokens"]) for item in batch]
        if method == "packed":
            yield collate_packed(batch, shift_labels=True, mask=None), torch.tensor(lengths)
        elif method == "padding-free":
            yield (
                collate_flattened(batch, shift_labels=True, mask=None),
                torch.tensor([sum(lengths)]),
            )
        else:
            made = padded_collate_sft(
                [{key: item[key].tolist() for key in ("tokens", "labels")} for item in batch]
            )
            made["labels"] = torch.nn.functional.pad(made["labels"][:, 1:], (0, 1), value=IGNORE)
            yield made, None


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Runs one method in this process."""
    cfg = OmegaConf.load(options.config)
    ranks = Ranks.start(utils.get_device(cfg.device))
    device, dtype = ranks.device, resolve_dtype(cfg.dtype, ranks.device)
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    store = samples_of(cfg, options.data[0], options.samples)
    if ranks.world_size > 1:
        _, weights = model_setup.load_base_weights(cfg)
        model = model_setup.build_model(cfg, ranks, dtype, weights)
    else:  # the time does not depend on the weights
        with device:
            torch.set_default_dtype(dtype)
            model = config.instantiate(cfg.model).train()
            torch.set_default_dtype(torch.float32)
        model.max_seq_len = max(model.max_seq_len, int(store.offsets[-1]))
    if options.layers:
        model.layers = model.layers[: options.layers]
    trained_rows = TrainedRows(model)
    attention = None
    if options.method != "padded":
        attention = install_attention(
            model, cfg.get("attention_backend", "auto"), device=device, dtype=dtype
        )

    def step(batch: dict[str, Any], real: torch.Tensor | None) -> None:
        inputs: dict[str, Any] = {}
        seq_lens = batch.get("seq_lens")
        if attention is not None:
            inputs["mask"] = attention.prepare(
                seq_lens, batch["tokens"].shape[1], real_lengths=real
            )
            inputs["input_pos"] = batch["input_pos"].to(device)
        else:
            seq_lens = torch.full((len(batch["labels"]), 1), batch["labels"].shape[1])
        rows = loss_rows(batch["labels"], seq_lens).to(device)
        with trained_rows.only(rows.rows):
            logits = model(batch["tokens"].to(device), **inputs)
        loss = sum_cross_entropy(logits, rows.targets) / max(rows.count, 1)
        del logits
        loss.backward()
        model.zero_grad()

    batches = list(batches_of(options.method, store, options.batch_size, cfg, ranks))
    step(*min(batches, key=lambda item: item[0]["tokens"].numel()))  # the first call is slower
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    ranks.barrier()
    start = time.perf_counter()
    for batch, real in batches:
        step(batch, real)
    if device.type == "cuda":
        torch.cuda.synchronize()
    ranks.barrier()
    seconds = time.perf_counter() - start
    (capacity,) = ranks.sum(sum(batch["tokens"].numel() for batch, _ in batches))
    real_tokens = int(store.offsets[-1])
    return {
        "seconds": seconds,
        "real_tokens_per_second": real_tokens / seconds,
        "real_share": real_tokens / capacity,
        "batches": len(batches),
        "peak_memory_gib": peak_memory(device)["peak_memory_gib"],
        "first": float(ranks.is_first),
    }


def in_a_process_of_its_own(options: argparse.Namespace, method: str, data: str) -> dict[str, Any]:
    """Starts this file again for one method; returns what rank 0 of it found."""
    many = options.nproc_per_node
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(many)] if many > 1 else []
    command = [sys.executable, *launcher, "-m", "benchmarks.padding_vs_packing"]
    command += ["--method", method, "--data", data, "--config", str(options.config)]
    for name in ("samples", "batch_size", "layers", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{method} on {data} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next(item for item in found if item.pop("first"))


def compare(options: argparse.Namespace, data: str) -> dict[str, Any]:
    """All methods in turn on one data set; prints the table and returns the figures."""
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for _ in range(options.rounds):
        for method in METHODS:
            runs[method].append(in_a_process_of_its_own(options, method, data))
    speed = {m: [run["real_tokens_per_second"] for run in found] for m, found in runs.items()}
    result: dict[str, Any] = {}
    for method, found in runs.items():
        result[method] = {
            "seconds": spread([run["seconds"] for run in found]),
            "real_tokens_per_second": spread(speed[method]),
            "over_padded": ratio(speed[method], speed["padded"]),
            "peak_memory_gib": spread([run["peak_memory_gib"] for run in found]),
            "real_share": found[0]["real_share"],
            "batches": found[0]["batches"],
        }
    print_table(
        f"{options.config}, data: {data}, {options.samples} samples, batch of {options.batch_size}",
        ["method", "time s", "real tokens/s", "x padded", "peak GiB", "real %", "batches"],
        [
            [
                method,
                f"{found['seconds']['median']:.1f}",
                f"{found['real_tokens_per_second']['median']:.0f}",
                f"{found['over_padded']['median']:.2f}",
                f"{found['peak_memory_gib']['median']:.2f}",
                f"{100 * found['real_share']:.0f}",
                found["batches"],
            ]
            for method, found in result.items()
        ],
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison, or one method of it when told so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2/135M_full.yaml"))
    parser.add_argument("--data", nargs="+", choices=("config", "qa"), default=["config", "qa"])
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a batch, unpacked")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help="keep so many layers; 0 keeps all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="4 layers, 32 samples, one round")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.samples, options.rounds, options.data = 4, 32, 1, ["config"]
    if options.method:
        print(json.dumps(measure(options)), flush=True)
        return
    results = {data: compare(options, data) for data in options.data}
    settings = {name: str(getattr(options, name)) for name in ("config", "samples", "batch_size")}
    finish("padding_vs_packing", {**settings, "layers": options.layers, "results": results})


if __name__ == "__main__":
    main()
