"""Counts and speeds under their own names, with a clock that does as it is told."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.helpers import D
from torchtune_packing import PackedDataset
from torchtune_packing.loss import loss_rows
from torchtune_packing.training import metrics
from torchtune_packing.training.data import Position, Step
from torchtune_packing.training.example import ShownExample
from torchtune_packing.training.loading import CountedCollate, EvenBatches
from torchtune_packing.training.metrics import StepCounts, StepMeter
from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.report import final_report

ALONE = Ranks(0, 1, torch.device("cpu"))


class Recorder:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def log(self, values: dict, step: int) -> None:
        self.logged.append((step, values))


def test_B60_real_trained_and_capacity_tokens_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[5, 3] in 12 in one second: 12 processed, 8 real, 6 trained, 2 documents."""
    packs = PackedDataset(D([5, 3]), max_seq_len=12, strategy="sequential")
    collate = CountedCollate(packed=True, padding_idx=0, ignore_idx=-100, static=(12, 4))
    item = collate([packs[0]])
    rows = loss_rows(item.batch["labels"], item.batch["seq_lens"])
    counts = item.counts(rows.num_trained, rows.count)
    assert counts == StepCounts(capacity=12, real=8, trained=6, documents=2, divisor=6)

    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    run, meter = Recorder(), StepMeter(ALONE, total_steps=1)
    step = Step([item], [rows], counts, Position(step=1))
    for got in meter.timed([step]):
        with meter.phase("forward"):
            now[0] += 0.75
        now[0] += 0.25
        meter.finish_step(run, got, {"loss": 1.5, "lr": 0.1})
    ((number, logged),) = run.logged
    assert number == 1
    assert logged["capacity_tokens_per_second"] == 12
    assert logged["real_tokens_per_second"] == 8
    assert logged["trained_tokens_per_second"] == 6
    assert logged["documents_per_step"] == 2
    assert logged["fill"] == pytest.approx(8 / 12)
    assert run.lines == ["step 1/1 epoch 1 | loss 1.5000 | 8 real tokens/s | fill 66.7%"]
    assert meter.summary()["share_forward"] == 0.75
    assert meter.summary()["real_tokens_per_second"] == 8


def test_time_spent_between_steps_is_not_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation or saving after a step must not slow down the next one's figure."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    run, meter = Recorder(), StepMeter(ALONE, total_steps=2)
    steps = [Step([], [], StepCounts(real=10, capacity=10, trained=1), Position(i)) for i in (1, 2)]
    for step in meter.timed(steps):
        now[0] += 2.0
        meter.finish_step(run, step, {"loss": 0.0})
        now[0] += 50.0
    assert [v["real_tokens_per_second"] for _, v in run.logged] == [5.0, 5.0]
    assert meter.step_seconds == 4.0


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_items", [1, 5, 12])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_even_batches_count_every_item_once(
    world_size: int, num_items: int, batch_size: int
) -> None:
    samplers = [
        EvenBatches(num_items, batch_size=batch_size, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    assert len({len(s) for s in samplers}) == 1
    counted = [b for s in samplers for b in list(s)[: s.num_counted]]
    assert sorted(i for batch in counted for i in batch) == list(range(num_items))


def test_peak_memory_of_this_process_is_in_gib() -> None:
    assert 0.05 < metrics.peak_memory(torch.device("cpu"))["peak_memory_gib"] < 1000


class Event:
    """A CUDA event: its time can be asked for only once the device has come to it."""

    reached = 0
    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.reached

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.number)

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "both events must be completed"
        return 1000.0 * (end.number - self.number)


def test_times_of_the_device_are_read_once_it_has_come_to_them(monkeypatch) -> None:
    """The update of the weights still runs when its step is over; nothing may wait for it."""
    monkeypatch.setattr(metrics.torch.cuda, "Event", Event)
    cuda = Ranks(0, 1, torch.device("cuda"))
    run, meter = Recorder(), StepMeter(cuda, total_steps=2, log_every_n_steps=9)
    steps = [Step([], [], StepCounts(trained=1), Position(i)) for i in (1, 2)]
    for step in meter.timed(steps):
        with meter.phase("forward"):
            pass
        with meter.phase("optimizer"):
            pass
        Event.reached = Event.recorded - 2  # the forward is done, the optimizer is not
        meter.finish_step(run, step, {"loss": 4.0 - step.position.step})
        assert Event.reached == Event.recorded - 2
    assert meter.seconds["forward"] == 2.0 and meter.seconds["optimizer"] == 1.0
    meter.summary()
    assert meter.seconds["optimizer"] == 2.0
    assert meter.losses == (3.0, 2.0)


class Meter:
    """A finished run that waited for its data and its masks."""

    losses = (2.5, 1.25)

    def __init__(self, **shares: float) -> None:
        self.shares = shares

    def summary(self) -> dict[str, float]:
        return {"steps": 7, "real_tokens_per_second": 90.0, **self.shares}


@pytest.mark.parametrize(
    ("shares", "workers", "said"),
    [
        ({"share_data": 0.06, "share_mask": 0.04}, 0, ["try num_workers=2."]),
        ({"share_data": 0.06, "share_mask": 0.04}, 4, ["try num_workers=8."]),
        ({"share_data": 0.04, "share_mask": 0.06}, 0, ["try another attention_backend."]),
        ({"share_data": 0.05, "share_mask": 0.05}, 0, []),
    ],
)
def test_summary_says_what_to_try_next(shares, workers, said) -> None:
    class Finished(Recorder):
        cfg = OmegaConf.create({"num_workers": workers})

        def resume_command(self) -> str:
            return "tune run"

    run, example = Finished(), ShownExample(None, None, None)
    assert final_report(run, Meter(**shares), (None, None), example, Path("out")) == 0
    assert [line.split(": ")[1] for line in run.lines if "try " in line] == said
    assert "training loss: 2.5000 in the first step, 1.2500 in the last" in run.lines
