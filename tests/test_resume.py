"""Runs that are killed, stopped and resumed, with real processes started by ``tune run``."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from recipes.full_finetune import FullFinetuneRecipe
from tests.test_full_finetune import losses
from tests.tiny import read_metrics, tiny_config
from torchtune_packing.training.checkpoint import RunCheckpoints

REPO = Path(__file__).resolve().parent.parent
TUNE = Path(sys.executable).with_name("tune")
ENV = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}


def start(
    config: DictConfig, recipe: str = "full", ranks: int = 1, **changes: Any
) -> subprocess.Popen:
    """Starts ``tune run`` on a config written to a file beside its output folder."""
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    path = Path(config.output_dir).with_suffix(".yaml")
    OmegaConf.save(config, path)
    many = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [TUNE, "run", *many, f"recipes/{recipe}_finetune.py", "--config", path]
    return subprocess.Popen(
        command, cwd=REPO, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """Waits for the process and checks how it ended; returns what it printed."""
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == code, shown
    return shown


def wait_for_step(config: DictConfig, step: int, process: subprocess.Popen) -> None:
    """Waits until a step has been logged, or the process has ended."""
    path = Path(config.output_dir) / "metrics.jsonl"
    for _ in range(2400):
        if process.poll() is not None:
            return
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came")


def slow(folder: Path, name: str, **changes: Any) -> DictConfig:
    """A run of 12 steps over two epochs that takes long enough to be hit by a signal."""
    logger = {
        "_component_": "tests.tiny.JsonLines",
        "path": "${output_dir}/metrics.jsonl",
        "delay": 0.15,
    }
    return tiny_config(
        folder,
        output_dir=str(folder / name),
        save_every_n_steps=2,
        metric_logger=logger,
        **changes,
    )


def final_weights(config: DictConfig) -> bytes:
    folder = RunCheckpoints(config.output_dir).latest()
    assert folder is not None and folder.name == "step_000012"
    return (folder / "model-00001-of-00001.safetensors").read_bytes()


def test_B19_killed_five_times_and_resumed_is_the_uninterrupted_run(tmp_path: Path) -> None:
    """SIGKILL at random moments: the same losses bit for bit, and the same final weights."""
    whole = tiny_config(tmp_path, output_dir=str(tmp_path / "whole"))
    recipe = FullFinetuneRecipe(whole)  # uninterrupted, in this process, with one thread
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    recipe.setup()
    assert recipe.train() == 0
    torch.set_num_threads(threads)

    draw, config = random.Random(5), slow(tmp_path, "killed")
    for kill in range(5):
        resume = RunCheckpoints(config.output_dir).latest() is not None
        process = start(config, resume_from_checkpoint=resume)
        wait_for_step(config, 2 * kill + 1 + draw.randrange(2), process)
        time.sleep(0.3 * draw.random())
        process.kill()
        shown, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, shown
    saved = RunCheckpoints(config.output_dir).latest()
    finish(start(config, resume_from_checkpoint=saved is not None))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert final_weights(config) == final_weights(whole)
    rates = [
        read_metrics(Path(c.output_dir))[s]["lr"] for c in (config, whole) for s in range(1, 13)
    ]
    assert rates[:12] == rates[12:]


@pytest.mark.parametrize(
    ("name", "number", "code"), [("term", signal.SIGTERM, 0), ("int", signal.SIGINT, 130)]
)
def test_polite_stop_saves_says_how_to_go_on_and_the_command_works(
    tmp_path: Path, name: str, number: int, code: int
) -> None:
    config = slow(tmp_path, name)
    process = start(config)
    wait_for_step(config, 3, process)
    process.send_signal(number)
    shown = finish(process, code)
    step = int(re.search(r"stopped after step (\d+); checkpoint", shown)[1])
    assert RunCheckpoints(config.output_dir).latest().name == f"step_{step:06d}"
    command = re.search(r"to go on: (.*)", shown)[1].removeprefix("PYTHONPATH=. ")
    arguments = shlex.split(command)
    assert arguments[0] == "tune"
    done = subprocess.run(
        [TUNE, *arguments[1:]], cwd=REPO, env=ENV, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    whole = tiny_config(tmp_path, output_dir=str(tmp_path / "whole"))
    finish(start(whole))
    assert losses(Path(config.output_dir)) == losses(tmp_path / "whole")
    assert final_weights(config) == final_weights(whole)


@pytest.mark.parametrize("step", [6, 9])
def test_resume_at_an_epochs_end_and_inside_the_second(tmp_path: Path, step: int) -> None:
    """In this process: stop exactly there, go on in a new recipe object."""
    whole = FullFinetuneRecipe(tiny_config(tmp_path, output_dir=str(tmp_path / "whole")))
    whole.setup()
    whole.train()

    config = tiny_config(tmp_path, output_dir=str(tmp_path / "parts"))
    first = FullFinetuneRecipe(config)
    first.setup()
    first.run.should_stop = lambda stop: first.position.step == step
    first.train()
    first.cleanup()
    assert RunCheckpoints(config.output_dir).latest().name == f"step_{step:06d}"
    config.resume_from_checkpoint = True
    second = FullFinetuneRecipe(config)
    second.setup()
    assert second.position.step == step
    second.train()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert final_weights(config) == final_weights(whole.cfg)


def test_resume_with_other_data_or_length_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, epochs=1)
    recipe = FullFinetuneRecipe(config)
    recipe.setup()
    recipe.train()
    for key, value, words in (
        ("dataset.max_seq_len", 128, "dataset.max_seq_len was 64 and is now 128"),
        ("dataset.source.seed", 3, "dataset.content was"),
        ("shuffle", False, "shuffle was True and is now False"),
    ):
        changed = config.copy()
        OmegaConf.update(changed, key, value, force_add=True)
        changed.resume_from_checkpoint = True
        resumed = FullFinetuneRecipe(changed)
        with pytest.raises(ValueError, match=words):
            resumed.setup()
        assert not hasattr(resumed, "model")


def test_B31_two_ranks_give_the_losses_and_weights_of_one_and_resume_as_one(tmp_path: Path) -> None:
    """One global batch on 1 rank and on 2 (gloo, FSDP2); unequal trained tokens on the ranks."""
    common = {"gradient_accumulation_steps": None, "packs_per_step": 4}
    one = tiny_config(tmp_path, output_dir=str(tmp_path / "one"), **common)
    recipe = FullFinetuneRecipe(one)
    recipe.setup()
    recipe.train()

    two = tiny_config(tmp_path, output_dir=str(tmp_path / "two"), save_every_n_steps=6, **common)
    shown = finish(start(two, ranks=2))
    assert shown.count("step 3/12") == 1  # rank 1 is silent
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    norms = [
        [read_metrics(tmp_path / n)[s]["grad_norm"] for s in range(1, 13)] for n in ("one", "two")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    weights = [
        load_file(RunCheckpoints(c.output_dir).latest() / "model-00001-of-00001.safetensors")
        for c in (one, two)
    ]
    for name, value in weights[0].items():
        assert (weights[1][name] - value).abs().max() < 1e-5, name

    # Two ranks stopped after step 6, one goes on.
    for folder in RunCheckpoints(two.output_dir).all()[1:]:
        folder.rename(folder.with_name("moved_away"))
    two.resume_from_checkpoint = True
    resumed = FullFinetuneRecipe(two)
    resumed.setup()
    assert resumed.position.step == 6
    resumed.train()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    final = load_file(tmp_path / "two" / "step_000012" / "model-00001-of-00001.safetensors")
    for name, value in weights[0].items():
        assert (final[name] - value).abs().max() < 1e-5, name
