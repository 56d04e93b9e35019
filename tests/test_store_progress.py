"""The progress of a build: a bar on a terminal, few plain lines in a log."""

import io
import sys
from pathlib import Path

import pytest

from tests.helpers import D
from torchtune_packing.store import TokenStore, progress
from torchtune_packing.store.progress import Progress
from torchtune_packing.store.shards import build_in_shards


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    TokenStore.from_samples(D([3, 2, 4]))
    shown = sys.stderr.getvalue()
    assert "Tokenizing: 100%" in shown and "3.00/3.00" in shown


def test_a_build_in_shards_shows_one_bar_that_knows_what_was_finished_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = D([3] * 25)
    with pytest.raises(ValueError, match="sample 20 has no"):
        build_in_shards(tmp_path, "key", lambda: [*good][:20] + [{}] * 5, shard_size=10)
    monkeypatch.setattr(sys, "stderr", Terminal())
    build_in_shards(tmp_path, "key", lambda: good, shard_size=10)
    shown = sys.stderr.getvalue()
    first, *_, last = shown.strip().splitlines()
    assert "Tokenizing:  80%" in first and "20.0/25.0" in first
    assert "Tokenizing: 100%" in last and "25.0/25.0" in last


def test_a_log_gets_a_plain_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress(1000, "Tokenizing") as bar:
        for _ in range(10):
            clock[0] += 8.0
            bar.update(100)
    with Progress(1000, "Tokenizing", done=900) as bar:
        clock[0] += 40.0
        bar.update(20)
    lines = capsys.readouterr().err.splitlines()
    assert lines.pop() == "Tokenizing: 920 of 1,000 samples in 40 s, about 160 s left"
    assert lines == [
        "Tokenizing: 400 of 1,000 samples in 32 s, about 48 s left",
        "Tokenizing: 800 of 1,000 samples in 64 s, about 16 s left",
    ]


def test_a_short_build_prints_nothing_into_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    TokenStore.from_samples(D([3] * 100))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("setting", ["rank", "argument"])
def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    if setting == "rank":
        monkeypatch.setenv("RANK", "1")
    TokenStore.from_samples(D([3]), progress=setting == "rank")
    assert sys.stderr.getvalue() == ""


def test_a_stream_without_length_counts_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress(None, "Tokenizing") as bar:
        clock[0] = 40.0
        bar.update(7)
    assert capsys.readouterr().err == "Tokenizing: 7 samples in 40 s\n"
