"""One training step of SmolLM2-135M on real docstrings, forward and backward, in five ways.

========================  ======================================================================
ours                      packed, ``varlen``, logits of trained rows only: what the recipes run
ours, all logits          the same with logits everywhere, so that only the attention differs
ours, sdpa                packed, dense mask, all logits
torchtune packed          torchtune's own layers under its own dense mask, all logits
torchtune padded          the same documents unpacked, eight at a time, padded to the longest
========================  ======================================================================

The documents, the weights, the dtype, the threads and the loss are the same for all; a step ends
with gradients of all weights. Candidates take turns, and ratios are taken round by round. Real
tokens are those that are not padding.

    python -m benchmarks.step [--quick] [--lengths 2048 4096 8192] [--dtype bf16|fp32] [--layers 30]

``--dtype auto`` is bf16 where the processor multiplies it, else fp32: without such instructions a
matrix product in bf16 takes about seven times as long as in fp32. Under a dense mask on a CPU each
layer keeps the mask as numbers for its backward, ``s * s`` of the model's dtype: with 30 layers at
8,192 positions that is 8 GB more in fp32, where only ``--layers 6`` fits into 24 GB, and 4 GB in
bf16, which fits. ``--quick`` keeps 6 layers too; the ratios of few layers lean towards the output
projection, which all share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchtune.modules.attention_utils import create_block_causal_mask
from torchtune.modules.loss import CEWithChunkedOutputLoss

from benchmarks.common import finish, interleaved, print_table, ratio, spread
from torchtune_packing import PackedDataset, collate_packed
from torchtune_packing.attention import install_attention
from torchtune_packing.datasets import python_docstrings_dataset
from torchtune_packing.loss import loss_rows, sum_cross_entropy
from torchtune_packing.masks import block_causal_mask
from torchtune_packing.models.smollm2 import smollm2_135m, smollm2_tokenizer
from torchtune_packing.quiet import silence_dependencies
from torchtune_packing.training.step import PackedForward

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
IGNORE = -100
PADDED_BATCH = 8


def build(dtype: torch.dtype, num_layers: int) -> Any:
    """SmolLM2 with seeded random weights: the time does not depend on them."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = smollm2_135m()
    finally:
        torch.set_default_dtype(default)
    model.layers = model.layers[:num_layers]
    model.set_num_output_chunks(8)
    return model.train()


def typical_pack(packed: PackedDataset) -> dict[str, torch.Tensor]:
    """The full pack whose sum of squared lengths is the median one."""
    costs = torch.tensor([int((packed[i]["seq_lens"] ** 2).sum()) for i in range(len(packed))])
    return dict(packed[int(costs.argsort()[len(costs) // 2])])


def stock_step(model: Any, batches: list[dict[str, torch.Tensor]], make_mask: Any) -> None:
    """What torchtune's recipes do: shift the labels, all logits, mean over the trained tokens."""
    loss_fn = CEWithChunkedOutputLoss()
    for batch in batches:
        mask = make_mask(batch)
        positions = {"input_pos": batch["input_pos"]} if "input_pos" in batch else {}
        logits = model(batch["tokens"], mask=mask, **positions)
        labels = batch["labels"]
        labels = torch.hstack((labels[..., 1:], torch.full_like(labels[:, :1], IGNORE)))
        loss = loss_fn(logits, labels)
        del logits
        loss.backward()
    model.zero_grad()


def candidates(
    pack: dict[str, torch.Tensor], s: int, dtype: torch.dtype, num_layers: int, quick: bool
) -> dict[str, Callable[[], None]]:
    """Name -> one step on the documents of a pack."""
    stock, ours = build(dtype, num_layers), build(dtype, num_layers)
    attn = install_attention(ours, "varlen", device="cpu", dtype=dtype)
    forward = PackedForward(ours, attn)
    aligned = collate_packed([pack], pad_to=s, shift_labels=True, mask=None)
    batch = collate_packed([pack], pad_to=s, mask=None)
    real = torch.tensor([int(pack["seq_lens"].sum())])
    rows = loss_rows(aligned["labels"], aligned["seq_lens"])

    def packed_by_us() -> None:
        logits = forward.logits(
            aligned["tokens"], aligned["input_pos"], aligned["seq_lens"], rows.rows, real
        )
        loss = sum_cross_entropy(logits, rows.targets) / rows.count
        del logits
        loss.backward()
        ours.zero_grad()

    def layout(batch: dict[str, torch.Tensor]) -> Any:
        return attn.prepare(batch["seq_lens"], s, real_lengths=real)

    def dense(batch: dict[str, torch.Tensor]) -> Any:
        return block_causal_mask(batch["seq_lens"], s)

    def torchtune_dense(batch: dict[str, torch.Tensor]) -> Any:
        return create_block_causal_mask([row[row > 0] for row in batch["seq_lens"]])

    lengths = pack["seq_lens"].tolist()
    documents = [pack[key].split(lengths) for key in ("tokens", "labels")]
    padded = []
    for first in range(0, len(lengths), PADDED_BATCH):
        tokens, labels = (
            torch.nn.utils.rnn.pad_sequence(
                list(column[first : first + PADDED_BATCH]), batch_first=True, padding_value=fill
            )
            for column, fill in zip(documents, (2, IGNORE), strict=True)
        )
        padded.append({"tokens": tokens, "labels": labels})

    steps: dict[str, Callable[[], None]] = {
        "ours": packed_by_us,
        "ours, all logits": lambda: stock_step(ours, [batch], layout),
        "ours, sdpa": lambda: stock_step(ours, [batch], dense),
        "torchtune packed": lambda: stock_step(stock, [batch], torchtune_dense),
        "torchtune padded": lambda: stock_step(stock, padded, lambda _: None),
    }
    if quick:
        del steps["ours, sdpa"]
    return steps


def main() -> None:
    """Runs the benchmark."""
    silence_dependencies()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1,024 positions, 6 layers, one round")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30, help="keep so many layers")
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments = parser.parse_args()
    if not (arguments.model / "tokenizer.json").is_file():
        parser.error(f"{arguments.model} holds no tokenizer.json; `make model` prepares it")
    if arguments.quick:
        arguments.lengths, arguments.rounds, arguments.layers = [1024], 1, 6
    fast_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    name = arguments.dtype
    if name == "auto":
        name = "bf16" if fast_bf16 else "fp32"
    num_layers = arguments.layers

    tokenizer = smollm2_tokenizer(str(arguments.model), max_seq_len=min(arguments.lengths))
    source = python_docstrings_dataset(tokenizer, split="train")
    result: dict[str, Any] = {"dtype": name, "bf16_instructions": fast_bf16, "layers": num_layers}
    for s in arguments.lengths:
        pack = typical_pack(PackedDataset(source, max_seq_len=s))
        real = int(pack["seq_lens"].sum())
        steps = candidates(pack, s, DTYPES[name], num_layers, arguments.quick)
        # A step of many seconds needs no warm-up.
        warmup = 0 if arguments.quick or s > 2048 else 1
        seconds = interleaved(steps, arguments.rounds, warmup)
        baseline = seconds["torchtune packed"]
        rows, found = [], {}
        for candidate, times in seconds.items():
            faster = ratio(baseline, times)
            found[candidate] = {"seconds": spread(times), "times_torchtune_packed": faster}
            middle = spread(times)["median"]
            rows.append(
                [
                    candidate,
                    f"{middle:.2f}",
                    f"{real / middle:.0f}",
                    f"{faster['median']:.2f}x ({faster['min']:.2f} to {faster['max']:.2f})",
                ]
            )
        documents = len(pack["seq_lens"])
        print_table(
            f"s = {s:,}: {documents} documents, {real:,} real tokens, {name}, {num_layers} layers",
            ["", "s a step", "real tokens/s", "against torchtune packed"],
            rows,
        )
        result[str(s)] = {"documents": documents, "real_tokens": real, "candidates": found}
    finish("step", result)


if __name__ == "__main__":
    main()
