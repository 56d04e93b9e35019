"""Draws the figures of the README and the docs from the documented functions of Python's library.

    python -m benchmarks.figures [--model DIR] [--out docs/figures]

Needs only the tokenizer of the quickstart's model (`make model`).
"""

from __future__ import annotations

import argparse

from benchmarks.common import finish
from torchtune_packing import PackedDataset
from torchtune_packing.accounting import accounting_lines
from torchtune_packing.datasets import python_docstrings_dataset
from torchtune_packing.models.smollm2 import smollm2_tokenizer
from torchtune_packing.plots import save_figures


def main() -> None:
    """Packs the data set, prints its accounting and draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="tokenizer folder")
    parser.add_argument("--out", default="docs/figures", help="folder of the PNG files")
    arguments = parser.parse_args()
    tokenizer = smollm2_tokenizer(arguments.model, max_seq_len=2048)
    dataset = PackedDataset(python_docstrings_dataset(tokenizer), max_seq_len=2048)
    for line in accounting_lines(dataset):
        print(line)
    files = save_figures(dataset, arguments.out)
    stats = dataset.stats
    facts = {"packs": stats.num_packs, "fill": stats.fill, "tokens": stats.num_packed_tokens}
    finish("figures", {**facts, "files": [str(file) for file in files]})


if __name__ == "__main__":
    main()
