"""Draws the figures of the README and the docs from the documented functions of Python's library.

    python -m benchmarks.figures [--check] [--model DIR] [--out docs/figures]

Needs only the tokenizer of the quickstart's model (`make model`). With `--check` it also runs
`recipes/check_packing.py` on that model, for the figure of docs/exactness.md: two minutes and 3 GB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import finish
from torchtune_packing import PackedDataset
from torchtune_packing.accounting import accounting_lines
from torchtune_packing.datasets import python_docstrings_dataset
from torchtune_packing.models.smollm2 import smollm2_tokenizer
from torchtune_packing.plots import save_figures

REPO = Path(__file__).resolve().parent.parent
#: The run whose table docs/exactness.md shows.
CHECK = (
    "recipes/check_packing.py --config configs/smollm2/135M_full.yaml check_packs=1 "
    "dtype=fp32 dataset.max_seq_len=512 dataset.overlong=drop dataset.source.limit=120"
).split()


def check_figure(model: Path, out: Path) -> Path:
    """Runs the check of packed against alone and keeps its figure.

    Args:
        model: folder of SmolLM2-135M-Instruct.
        out: folder of the PNG files.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "torchtune._cli.tune", "run", *CHECK]
            + [f"model_dir={model.resolve()}", f"check_output={folder}"],
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": "."},
            check=True,
        )
        return Path(shutil.copy(Path(folder) / "check_packing.png", out / "check_packing.png"))


def main() -> None:
    """Packs the data set, prints its accounting and draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="model folder")
    parser.add_argument("--out", default="docs/figures", help="folder of the PNG files")
    parser.add_argument("--check", action="store_true", help="draw the check of the model too")
    arguments = parser.parse_args()
    source = python_docstrings_dataset(smollm2_tokenizer(arguments.model))
    dataset = PackedDataset(source, max_seq_len=2048, overlong="truncate")
    for line in accounting_lines(dataset):
        print(line)
    files = save_figures(dataset, arguments.out)
    if arguments.check:
        files.append(check_figure(Path(arguments.model), Path(arguments.out)))
    stats = dataset.stats
    facts = {"packs": stats.num_packs, "fill": stats.fill, "tokens": stats.num_packed_tokens}
    finish("figures", {**facts, "files": [str(file) for file in files]})


if __name__ == "__main__":
    main()
