"""Proves on your model and your data that packed equals unpacked.

    PYTHONPATH=. tune run recipes/check_packing.py --config <any config of yours>
    PYTHONPATH=. tune run recipes/check_packing.py --config configs/smollm2/135M_full.yaml

Takes a few packs of the config's data set and the config's model, checkpoint, backend, dtype and
device, and compares the packs with the same documents one at a time. Prints one table, writes it
and a figure of what the model attends to, and exits with 0 only if every line passes. Nothing is
trained. docs/exactness.md explains each line.

Configs of the two finetuning recipes work as they are, and so does a stock torchtune config whose
`dataset` is a packed_dataset of ours; keys that only training needs are not looked at. Two keys of
its own:

    check_packs: 2                        # packs to look at
    check_output: <output_dir>/check_packing    # folder for table and figure
"""

import sys
import textwrap
from pathlib import Path

from torchtune_packing import quiet

quiet.silence_dependencies()  # before the imports below, which read its settings once

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training, utils

from torchtune_packing.attention import install_attention
from torchtune_packing.plots import plot_attention_pattern
from torchtune_packing.training import (
    check,
    check_data,
    check_reference,
    config_values,
    model_setup,
    preflight,
)
from torchtune_packing.training.check_data import Line
from torchtune_packing.training.data import open_dataset
from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.step import PackedForward

_NEEDED = ("model", "checkpointer", "tokenizer", "dataset", "device", "dtype")
_POSITIVE = ("check_packs", "batch_size")


class CheckPackingRecipe:
    """Compares packs with their documents one at a time.

    Args:
        cfg: the config of a training run.
    """

    def __init__(self, cfg: DictConfig) -> None:
        missing = [key for key in _NEEDED if cfg.get(key, None) is None]
        if missing:
            raise ValueError(f"the config lacks {', '.join(missing)}; give the config of a run")
        problems = list(preflight.part_problems(cfg, _NEEDED))
        preflight.refuse([*problems, *config_values.positive_problems(cfg, _POSITIVE)])
        # Compiled below, after the reference has run; logits in chunks would only be in the way.
        settings = OmegaConf.to_container(cfg, resolve=True)
        self.cfg = OmegaConf.create({**settings, "compile": False, "num_output_chunks": None})
        self.compiled = bool(cfg.get("compile", False))
        self.num_packs = cfg.get("check_packs", 2)
        default = Path(str(cfg.get("output_dir", None) or ".")) / "check_packing"
        self.output = Path(str(cfg.get("check_output", None) or default))
        self.reduction = cfg.get("loss_reduction", "token")

    def setup(self) -> None:
        """Opens data and model; the attention stays torchtune's own until the reference has run."""
        cfg = self.cfg
        self.ranks = Ranks.start(utils.get_device(cfg.device))
        if self.ranks.world_size > 1:
            raise ValueError(
                f"check_packing runs in one process, and there are {self.ranks.world_size}; leave "
                "--nproc_per_node out"
            )
        self.dtype = config_values.resolve_dtype(cfg.dtype, self.ranks.device)
        seed = int(cfg.get("seed", None) or 0)
        torch.manual_seed(seed)

        tokenizer = config.instantiate(cfg.tokenizer)
        dataset = open_dataset(cfg.dataset, tokenizer)
        padding_free = preflight.is_padding_free(cfg)
        # Too long a document has a line of its own in the table.
        limits = preflight.model_limits(preflight.shapes_of_model(cfg))._replace(positions=None)
        preflight.check_data(dataset, limits, padding_free=padding_free, key="dataset")
        self.batches = check_data.read_batches(
            dataset,
            cfg,
            count=self.num_packs,
            padding_idx=getattr(tokenizer, "pad_id", None) or 0,
            static_shapes=self.compiled or self.ranks.device.type == "cuda",
        )
        _, weights = model_setup.load_base_weights(cfg)
        model = model_setup.build_model(cfg, self.ranks, self.dtype, weights, seed=seed)
        self.model = model.eval()  # no dropout: it would differ from run to run

    def check(self) -> list[Line]:
        """Runs everything; returns the lines of the table, and keeps the measured pattern."""
        batches, cfg = self.batches, self.cfg
        self.pattern: check.Pattern | None = None
        self.reason = "attention was not installed"

        # What the batches say, before a model sees them.
        table = check_reference.rotary_table_size(self.model)
        lines = [check_data.check_documents(batches), check_data.check_targets(batches)]
        lines += check_data.check_positions(batches, table)
        if not lines[-1].passed:  # the model would read past its table
            return [*lines, Line("the model", "not run", "", False)]

        # The reference: torchtune's model, one document at a time, before anything is prepared.
        documents = [document for item in batches for document in item.documents]
        alone = check_reference.measure_alone(
            self.model, documents, dtype=self.dtype, reduction=self.reduction
        )

        # From here on everything is packed, as in the finetuning recipes.
        asked = cfg.get("attention_backend", "auto")
        attention = install_attention(self.model, asked, device=self.ranks.device, dtype=self.dtype)
        self.reason = attention.reason
        if self.compiled:
            training.compile_model(self.model, verbose=False)
        forward = PackedForward(self.model, attention)
        lines += check.check_logits(forward, batches, alone)
        lines += check.check_loss_and_gradients(forward, batches, alone, self.reduction)
        lines.append(check.check_leak(forward, batches))
        self.pattern = check.measure_pattern(forward, batches[0])
        lines.append(check.check_pattern(self.pattern))
        lines.append(check.check_backend(forward, batches, asked, compiled=self.compiled))
        return lines

    def report(self, lines: list[Line]) -> int:
        """Prints and writes the table and the figure; returns the exit code."""
        documents = [document for item in self.batches for document in item.documents]
        packs = sum(item.micro_batch.batch["tokens"].shape[0] for item in self.batches)
        tokens = sum(len(document.tokens) for document in documents)
        text = [
            f"Packed against alone: {packs} packs, {len(documents)} documents, {tokens:,} tokens",
            *_wrapped(f"{self.cfg.model._component_}; {self.reason}"),
            "",
            f"{'check':<28}{'found':>20}{'limit':>20}",
        ]
        for line in lines:
            verdict = "pass" if line.passed else "FAIL"
            text.append(f"{line.name:<28}{line.found:>20}{line.limit:>20}   {verdict}")
        text.append("")
        for line in lines:
            if line.note:
                text += _wrapped(f"{line.name}: {line.note}")
        self.output.mkdir(parents=True, exist_ok=True)
        figure = self.output / "check_packing.png"
        if self.pattern is not None:
            plot_attention_pattern(
                self.pattern.moved.numpy(), self.pattern.probes, self.pattern.bounds
            ).savefig(figure)
            text.append(f"figure: {figure}")
        failed = [line.name for line in lines if not line.passed]
        text.append(
            f"FAILED: {len(failed)} of {len(lines)} checks"
            if failed
            else f"All {len(lines)} checks passed: packed equals unpacked."
        )
        print("\n".join(text), flush=True)
        (self.output / "check_packing.txt").write_text("\n".join(text) + "\n")
        return 1 if failed else 0


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=80, subsequent_indent="  ")


@config.parse
def main(cfg: DictConfig) -> int:
    """Checks with the config and the overrides of the command line."""
    with preflight.explained():
        recipe = CheckPackingRecipe(cfg)
        recipe.setup()
        lines = recipe.check()
    return recipe.report(lines)


if __name__ == "__main__":
    preflight.require_config_file(sys.argv)
    sys.exit(main())
