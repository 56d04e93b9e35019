"""Silences what dependencies print and nobody here can fix, once, before they are imported.

A recipe imports this module first and calls ``silence_dependencies``. Each entry says why it is
safe to drop; anything else that a library prints gets through.
"""

import os
import sys
import warnings

# Message (a regular expression for its beginning) and category of each warning that is dropped.
_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # torchtune's RMSNorm computes in float32 with a bf16 weight on purpose; torch then says, once,
    # that its fused kernel does not apply. The result is the same.
    (r"Mismatch dtype between input and weight", UserWarning),
)

_ENVIRONMENT = {
    # `datasets` draws a progress bar for every file that it reads; ours shows the tokenizing.
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # It also logs what it then raises, which is told here in a sentence of our own.
    "DATASETS_VERBOSITY": "critical",
    # Loader workers are forked after a tokenizer was used in the main process, which is safe here:
    # a worker does not tokenize in threads. Unset, each fork prints a warning.
    "TOKENIZERS_PARALLELISM": "false",
}


def silence_dependencies() -> None:
    """Installs the warning filters and sets the environment; what a user has set is kept."""
    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _settle_datasets()


def _settle_datasets() -> None:
    """Gives `datasets` its settings if `tune` imported it before they were in the environment."""
    datasets = sys.modules.get("datasets")
    if datasets is None:
        return
    if os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1":
        datasets.disable_progress_bars()
    level = getattr(datasets.logging, os.environ["DATASETS_VERBOSITY"].upper(), None)
    if isinstance(level, int):
        datasets.logging.set_verbosity(level)
