"""Checkpoints are whole or not there: with real files, and a writer that dies halfway."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtune_packing.training.checkpoint import RunCheckpoints, read_state, write_state


def fill_with(step: int):
    def fill(folder: Path) -> None:
        write_state(folder, {"x": torch.tensor([step])}, {"step": step})

    return fill


def test_newest_whole_one_is_taken_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep_last_n=2)
    assert checkpoints.latest() is None
    for step in (2, 9, 10, 100):
        checkpoints.write(step, fill_with(step))
    assert [p.name for p in checkpoints.all()] == ["step_000010", "step_000100"]
    tensors, facts = read_state(checkpoints.latest())
    assert tensors["x"].tolist() == [100] and facts["step"] == 100


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    """step_1000000 has more digits than step_999999 and is newer all the same."""
    checkpoints = RunCheckpoints(tmp_path)
    for step in (999_999, 1_000_000):
        checkpoints.write(step, fill_with(step))
    assert checkpoints.latest().name == "step_1000000"


def test_writer_that_fails_leaves_the_last_whole_one(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, keep_last_n=1)
    checkpoints.write(1, fill_with(1))

    def fail(folder: Path) -> None:
        write_state(folder, {}, {"step": 2})
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(2, fail)
    assert checkpoints.latest().name == "step_000001"
    checkpoints.write(3, fill_with(3))  # and what the failure left behind is cleaned up
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003"]


def test_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.write(5, fill_with(1))
    checkpoints.write(5, fill_with(2))
    assert read_state(checkpoints.latest())[1]["step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step_000005"]


def test_killed_writer_leaves_no_usable_looking_half(tmp_path: Path) -> None:
    """A process is killed by SIGKILL while it fills the folder."""
    script = f"""
import os, signal, sys
from pathlib import Path
from torchtune_packing.training.checkpoint import RunCheckpoints, write_state
def fill(folder):
    write_state(folder, {{}}, {{"step": 2}})
    os.kill(os.getpid(), signal.SIGKILL)
RunCheckpoints({str(tmp_path)!r}).write(2, fill)
"""
    RunCheckpoints(tmp_path).write(1, fill_with(1))
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "step_000002.partial").is_dir()
    assert RunCheckpoints(tmp_path).latest().name == "step_000001"


@pytest.mark.parametrize("missing", ["training_state.json", "training_state.pt"])
def test_B25_missing_or_foreign_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = RunCheckpoints(tmp_path).write(1, fill_with(1))
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"{missing} is missing .*step_<n> folder"):
        read_state(folder)


def test_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """A pickle that calls something is not loaded, and nothing is called."""
    folder = RunCheckpoints(tmp_path).write(1, fill_with(1))
    victim = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (victim,))

    torch.save({"x": Evil()}, folder / "training_state.pt")
    with pytest.raises(ValueError, match="cannot be read as plain tensors"):
        read_state(folder)
    assert not victim.exists()


def test_facts_are_readable_json(tmp_path: Path) -> None:
    folder = RunCheckpoints(tmp_path).write(1, fill_with(7))
    assert json.loads((folder / "training_state.json").read_text()) == {"step": 7}


def test_keep_last_n_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last_n_checkpoints is 0; it must be at least 1"):
        RunCheckpoints(tmp_path, keep_last_n=0)
