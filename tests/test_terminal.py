"""What a run shows on a terminal of 80 columns, in a file, and from which process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.terminal import on_terminal, rows_of
from tests.tiny import tiny_config
from torchtune_packing.training.stop import StopRequest

REPO = Path(__file__).resolve().parent.parent

METER = """
import sys, time, types, warnings
import torch
from torchtune_packing.training.data import Position, Step
from torchtune_packing.training.metrics import StepCounts, StepMeter
from torchtune_packing.training.parallel import Ranks

rank = int(sys.argv[1])
say = lambda line: print(line, flush=True) if rank == 0 else None
run = types.SimpleNamespace(say=say, log=lambda values, step: None)
meter = StepMeter(Ranks(rank, 2, torch.device("cpu")), total_steps=1234, done_steps=1229)
counts = [StepCounts(real=9e5, capacity=1e6, trained=trained) for trained in (1, 0, 1, 1, 1)]
steps = [Step([], [], c, Position(1230 + i)) for i, c in enumerate(counts)]
for step in meter.timed(steps):
    time.sleep(0.12)  # a bar is drawn ten times a second at most
    meter.finish_step(run, step, {"loss": 2.5})
    if step.position.step == 1232:
        say("validation loss 2.1234 after step 1232")
        warnings.warn("a word from a library")
meter.close()
say("checkpoint: runs/x/step_001234")
"""


def test_a_terminal_of_two_rows_by_hand() -> None:
    assert rows_of("ab\rc\n\rdefgh\x1b[31mX\x1b[0m", 5) == ["cb", "defgh", "X"]
    assert rows_of("one\r\ntwo\x1b[A\r\x1b[2K1", 80) == ["1ne", "two"]


def test_lines_appear_above_one_bar() -> None:
    shown = on_terminal([sys.executable, "-c", METER, "0"])
    assert shown.code == 0, shown.text
    rows = [row for row in shown.rows if row]
    assert max(map(len, shown.rows)) <= 80
    assert rows[0] == "warning: step 1231 has no trained target; no weight moved."
    assert rows[1] == "validation loss 2.1234 after step 1232"
    assert "a word from a library" in rows[2]
    # The library's warning has a second row with its source line; then the bar, then the rest.
    bars = [row for row in rows if row.startswith("1234/1234 |") or "steps" in row or "█" in row]
    assert len(bars) == 1 and bars[0] == rows[-2]
    assert "loss 2.5000 | " in bars[0] and "| fill 90.0%" in bars[0]
    assert rows[-1] == "checkpoint: runs/x/step_001234"
    assert not any(row.startswith("step 123") for row in rows)


def test_a_log_file_gets_its_lines_while_the_terminal_shows_the_bar(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        shown = on_terminal([sys.executable, "-c", METER, "0"], stdout=log.fileno())
    assert "1234/1234 |" in shown.rows[-2] or "1234/1234 |" in shown.rows[-1]
    lines = (tmp_path / "log").read_text().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{n}/1234" for n in range(1230, 1235)]
    assert len(lines) == 5 + 3
    assert max(map(len, lines)) <= 80
    assert "\r" not in (tmp_path / "log").read_text()


def test_other_ranks_show_nothing() -> None:
    shown = on_terminal([sys.executable, "-W", "ignore", "-c", METER, "1"])
    assert (shown.code, shown.text) == (0, "")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_process_says_that_it_stops(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    stop = StopRequest()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher may pass it on a second time
        assert stop and stop.exit_code == 0
    finally:
        stop.restore()
    said = "SIGTERM: finishing this step, then saving.\n"
    assert capsys.readouterr() == ("", said if rank == "0" else "")


def test_a_recipe_on_a_terminal_has_whole_lines_and_one_bar(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, epochs=1, run_val_every_n_steps=2, save_every_n_steps=2)
    OmegaConf.save(config, tmp_path / "config.yaml")
    tune = [sys.executable, "-m", "torchtune._cli.tune", "run"]
    command = [*tune, "recipes/full_finetune.py", "--config", str(tmp_path / "config.yaml")]
    shown = on_terminal(command)
    assert shown.code == 0, shown.text
    bars = [row for row in shown.rows if " |" in row and "real tokens/s |" in row]
    assert len(bars) == 1 and bars[0].startswith("6/6 |"), shown.rows
    names_a_path = [row for row in shown.rows if str(tmp_path)[:8] in row]
    assert all(len(row) <= 80 for row in shown.rows if row not in names_a_path)
    done = subprocess.run(
        [*command, "overwrite_output_dir=True"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("real tokens/s | fill") == 6 and done.stderr == ""
