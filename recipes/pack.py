"""Packs the data of a config ahead of training, and shows what packing does to it.

    PYTHONPATH=. tune run recipes/pack.py --config configs/smollm2/135M_full.yaml
    PYTHONPATH=. tune run --nnodes N --nproc_per_node M recipes/pack.py --config <config>

It takes the config of a training recipe and reads `tokenizer`, `dataset` and, to predict times,
`model`, `device` and `dtype`; no weights. What it does, in order:

1.  tokenizes the data set into its store (`dataset.cache_dir`), by all processes of the launcher
    when there are several, so that training finds it;
2.  prints what became of every document and token;
3.  plans other pack lengths and strategies and predicts the time of each against padded batches;
4.  draws figures.

Keys of its own, to be given on the command line:

    max_seq_lens=[1024,2048]     pack lengths to try; default: half, same and double
    strategies=[best_fit]        default: best_fit and sequential
    padded_batch_size=8          documents of the padded batches to compare with
    world_size=8                 ranks of the training run, for waiting and steps
    figures_dir=<folder>         default: <output_dir>/packing; null draws nothing
    predict_time=False           measures nothing
    --json                       prints one JSON object and nothing else (json=True does too)

On a terminal the two tables are drawn with lines and colour; in a file they are plain text.
"""

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torchtune_packing import quiet

quiet.silence_dependencies()  # before the imports below, which read its settings once

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune import config

from torchtune_packing.accounting import (
    accounting_lines,
    accounting_table,
    check_token_loss,
    effective_batch,
    waiting,
)
from torchtune_packing.cost_model import CostModel, layer_shape, measure
from torchtune_packing.datasets.packed import build_store
from torchtune_packing.pack_options import Option, choose, option_lines, pack_options
from torchtune_packing.plan import STRATEGIES
from torchtune_packing.training import config_values, preflight

KEYS = frozenset(
    "max_seq_lens strategies padded_batch_size world_size figures_dir predict_time json".split()
)


def check(cfg: DictConfig) -> None:
    """Refuses a config that cannot be packed, with everything that is wrong with it."""
    known = preflight.COMMON_KEYS | preflight.LORA_KEYS | KEYS
    problems = list(preflight.unknown_keys(OmegaConf.to_container(cfg, resolve=False), known))
    problems += [f"`{key}` is missing." for key in ("tokenizer", "dataset") if key not in cfg]
    problems += preflight.part_problems(cfg, ("tokenizer", "dataset", "model"))
    wrong = list(config_values.positive_problems(cfg, ("world_size", "padded_batch_size")))
    problems += wrong
    problems += config_values.value_problems(cfg, 1 if wrong else cfg.get("world_size", 1))
    problems += [
        f"`max_seq_lens` holds {size!r}; each must be a whole number of at least 1."
        for size in as_list(cfg.get("max_seq_lens", None), [])
        if not isinstance(size, int) or isinstance(size, bool) or size < 1
    ]
    problems += [
        f"`strategies` holds {name!r}; it can hold {' and '.join(STRATEGIES)}."
        for name in as_list(cfg.get("strategies", None), [])
        if name not in STRATEGIES
    ]
    # Only the name: the data may be packed on another machine than the one that trains.
    problems += config_values.device_name_problems(cfg)
    if "packed_dataset" not in str(cfg.get("dataset", {}).get("_component_", "")):
        problems.append(
            "`dataset` is not packed; wrap it as `source` of "
            "torchtune_packing.datasets.packed_dataset."
        )
    preflight.refuse(problems)


def cost_model(cfg: DictConfig, longest: int) -> tuple[CostModel | None, int | None]:
    """Measures a layer of the config's model; also the model's positions.

    Without a model there is neither, without the config's device no measurement: a login node says
    nothing about the GPU of another.
    """
    if "model" not in cfg:
        return None, None
    with torch.device("meta"):
        model = config.instantiate(cfg.model)
    positions = getattr(model, "max_seq_len", None)
    device = torch.device(cfg.get("device", "cpu"))
    is_here = device.type == "cpu" or torch.cuda.is_available()
    if not cfg.get("predict_time", True) or not is_here:
        return None, positions
    cost = measure(
        layer_shape(model),
        device=device,
        dtype=config_values.resolve_dtype(cfg.get("dtype", "auto"), device),
        backend=cfg.get("attention_backend", "auto"),
        max_seq_len=longest,
    )
    return cost, positions


class Table(NamedTuple):
    """A table in both forms: plain lines for a file, cells for a terminal."""

    lines: list[str]
    header: Sequence[str]
    rows: list[list[str]]
    marked: int | None = None
    notes: Sequence[str] = ()


def data_table(dataset: Any, lines: list[str]) -> Table:
    """What became of every document and token."""
    total = dataset.stats.num_tokens
    rows = [
        [name, f"{documents:,}", f"{tokens:,}", f"{100 * tokens / total:.2f} %"]
        for name, documents, tokens in accounting_table(dataset)
    ]
    return Table(lines, ("", "documents", "tokens", "share"), rows)


def option_table(options: Sequence[Option], taken: Option | None) -> Table:
    """The other ways to pack; the one to take is marked."""
    header = ("strategy", "max_seq_len", "packs", "fill", "steps/epoch", "time/padded")
    rows, notes = [], []
    for option in options:
        time = "-" if option.relative_time is None else f"{option.relative_time:.2f}"
        numbers = [f"{option.packs:,}", f"{100 * option.fill:.2f} %", f"{option.steps_per_epoch:,}"]
        numbers = [*numbers, time] if option.packs else ["-"] * 4
        rows.append([option.strategy, f"{option.max_seq_len:,}", *numbers])
        if option.problem:
            notes.append(f"{option.strategy}, {option.max_seq_len:,}: {option.problem}")
    marked = None if taken is None else options.index(taken)
    return Table(option_lines(options, taken), header, rows, marked, notes)


def plain(report: Iterable[str | Table]) -> list[str]:
    """The report as lines of at most 80 columns, for a file."""
    lines = []
    for part in report:
        lines += [part] if isinstance(part, str) else part.lines
    return lines


def show_on_terminal(report: Iterable[str | Table]) -> None:
    """The same with drawn tables, as wide as the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console(highlight=False)
    for part in report:
        if isinstance(part, str):
            if part:  # tables have space around them
                console.print(part, markup=False)
            continue
        drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(part.header):
            drawn.add_column(name, justify="right" if i else "left", no_wrap=True)
        for i, row in enumerate(part.rows):
            drawn.add_row(*row, style="bold green" if i == part.marked else None)
        console.print(drawn)
        for note in part.notes:
            console.print(note, markup=False, style="yellow")


def wrapped(text: str, indent: str = "") -> list[str]:
    """A sentence in lines of at most 80 columns."""
    return textwrap.wrap(
        text, 80, initial_indent=indent, subsequent_indent="    ", break_on_hyphens=False
    )


def as_list(value: Any, default: list) -> list:
    """A config value that may be left out, or be one thing instead of a list of them."""
    if value is None:
        return default
    return list(value) if isinstance(value, (list, ListConfig)) else [value]


def pack(cfg: DictConfig) -> tuple[dict[str, Any], list[str | Table]]:
    """Packs and compares; returns the facts for JSON and the report to show."""
    check(cfg)
    tokenizer = config.instantiate(cfg.tokenizer)

    # The store: by all processes together, or by this one when the data set is opened.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        build_store(tokenizer, cfg.dataset)
        if os.environ.get("RANK", "0") != "0":
            return {}, []
    dataset = config.instantiate(cfg.dataset, tokenizer)

    # What became of every document, and what a step of the training run will be made of.
    batch_size, world_size = cfg.get("batch_size", None) or 1, cfg.get("world_size", 1)
    accumulation = max(1, config_values.accumulation_steps(cfg, world_size))
    packs_per_step = batch_size * accumulation * world_size
    order = {
        "batch_size": batch_size,
        "seed": cfg.get("seed", None) or 0,
        "shuffle": cfg.get("shuffle", True),
        "balance": cfg.get("balance", True),
    }
    lines = accounting_lines(dataset, world_size, packs_per_step, **order)
    num_table_lines = 1 + len(accounting_table(dataset))
    report: list[str | Table] = [
        data_table(dataset, lines[:num_table_lines]),
        *lines[num_table_lines:],
    ]

    # Other lengths and strategies, from the same store: nothing is tokenized again.
    size = dataset.max_seq_len
    around = [size // 2 or 1, size, 2 * size]
    sizes = sorted(set(as_list(cfg.get("max_seq_lens", None), around)))
    strategies = as_list(cfg.get("strategies", None), list(STRATEGIES))
    cost, positions = cost_model(cfg, max(sizes))
    padded_batch_size = cfg.get("padded_batch_size", 8)
    options = pack_options(
        dataset,
        sizes,
        strategies,
        batch_size=batch_size,
        packs_per_step=packs_per_step,
        padded_batch_size=padded_batch_size,
        max_token_loss=cfg.get("max_token_loss", 0.01),
        model_max_seq_len=positions,
        cost=cost,
        static_shapes=bool(cfg.get("compile", False)) or str(cfg.get("device")).startswith("cuda"),
    )
    taken, reason = choose(options, 0.0 if cost is None else cost.error)
    report += ["", option_table(options, taken)]
    if cost is not None:
        report += wrapped(
            f"time/padded: predicted time of an epoch over that of padded batches of "
            f"{padded_batch_size}, from one layer on {cfg.get('device', 'cpu')} with "
            f"{cost.backend} attention; within {max(1, math.ceil(100 * cost.error))} % on "
            f"{len(cost.unseen)} rows that it was not fitted to"
        )
    elif "model" in cfg and cfg.get("predict_time", True):
        report.append(f"no time predicted: this machine has no {cfg.device}")
    if taken is not None:
        report.append(f"would take: {taken.strategy}, max_seq_len={taken.max_seq_len}")
    report += wrapped(f"because: {reason}", "    ")

    facts = {
        "stats": dataset.stats.as_dict(),
        "waiting": waiting(
            dataset.plan.attention_cost,
            gradient_accumulation_steps=accumulation,
            world_size=world_size,
            **order,
        ),
        "effective_batch": effective_batch(dataset, packs_per_step),
        "packs_per_step": packs_per_step,
        "options": [option.as_dict() for option in options],
        "taken": None if taken is None else taken.as_dict(),
        "reason": reason,
        "cost_model": None if cost is None else cost.as_dict(),
    }

    default = f"{cfg.output_dir}/packing" if "output_dir" in cfg else "packing"
    folder = cfg.get("figures_dir", default)
    if folder is not None:
        from torchtune_packing.plots import save_figures

        files = save_figures(dataset, folder, padded_batch_size=padded_batch_size)
        facts["figures"] = [str(file) for file in files]
        report.append(f"figures: {folder}/*.png")
    try:
        check_token_loss(dataset, cfg.get("max_token_loss", 0.01))
    except ValueError as error:
        facts["training_would_stop"] = str(error)
        report += wrapped(f"training would stop: {error}")
    return facts, report


@config.parse
def main(cfg: DictConfig) -> int:
    """Packs the data of a config and shows what came of it."""
    with preflight.explained():
        facts, report = pack(cfg)
    if not facts:  # another process of a launcher than the first
        return 0
    if cfg.get("json", False):
        print(json.dumps(facts), flush=True)
    elif sys.stdout.isatty():
        show_on_terminal(report)
    else:
        print("\n".join(plain(report)), flush=True)
    return 1 if "training_would_stop" in facts else 0


if __name__ == "__main__":
    # torchtune's parser knows keys, not flags.
    sys.argv = ["json=True" if argument == "--json" else argument for argument in sys.argv]
    preflight.require_config_file(sys.argv)
    sys.exit(main())
