"""Settings and fixtures of the whole suite."""

import os
import subprocess
import sys
from pathlib import Path

# Before any import of torch, tokenizers or transformers: they read these once.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import pytest
import torch
from hypothesis import settings

REPO = Path(__file__).resolve().parent.parent

# Two threads everywhere, so that a figure does not depend on the machine's core count.
torch.set_num_threads(2)

# The same examples on every run; no deadline, because the machine may be busy.
settings.register_profile("repo", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked ``gpu`` where there is no CUDA device, and says so in the summary."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder with SmolLM2-135M-Instruct, prepared here when it is missing."""
    folder = REPO / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "model.safetensors").is_file():
        command = [sys.executable, "-m", "torchtune_packing.models.smollm2.download", str(folder)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        if done.returncode:
            pytest.fail(
                f"The tests need the model folder {folder}, and `make model` could not prepare it:"
                f"\n{done.stdout}{done.stderr}",
                pytrace=False,
            )
    return folder
