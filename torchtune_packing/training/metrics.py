"""Numbers of a training run that mean what their names say.

Three token counts are kept apart, since a speed is only comparable when its tokens are named:

=========  ==================================================================
capacity   every position that went through the model (``b * s``)
real       positions that hold a document; the headline speed counts these
trained    positions whose target is not ``IGNORE_INDEX``
=========  ==================================================================

The padding tail of a row is not a document and is never counted as one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from tqdm import tqdm

from torchtune_packing.training.parallel import Ranks

if TYPE_CHECKING:
    from torchtune_packing.training.data import Step
    from torchtune_packing.training.run import Run

__all__ = ["PHASES", "StepCounts", "StepMeter", "peak_memory"]

#: What the time of a step is divided into.
PHASES = ("data", "mask", "forward", "backward", "optimizer")


@dataclass
class StepCounts:
    """What one optimizer step, or a whole run, was made of.

    Attributes:
        capacity: positions, padding included.
        real: positions that hold a document.
        trained: positions with a target.
        documents: documents (the padding tail is none).
        divisor: what the summed loss is divided by (trained targets, or documents).
    """

    capacity: float = 0
    real: float = 0
    trained: float = 0
    documents: float = 0
    divisor: float = 0

    def add(self, other: StepCounts) -> None:
        """Adds another step's counts to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def over_ranks(self, ranks: Ranks) -> StepCounts:
        """The counts of all ranks together, a new object: these stay what they are."""
        return StepCounts(*ranks.sum(*(getattr(self, field.name) for field in fields(self))))

    def rates(self, seconds: float) -> dict[str, float]:
        """Tokens per second of each kind, documents and fill, for a step that took ``seconds``."""
        return {
            "real_tokens_per_second": self.real / seconds,
            "trained_tokens_per_second": self.trained / seconds,
            "capacity_tokens_per_second": self.capacity / seconds,
            "documents_per_step": self.documents,
            "fill": self.real / self.capacity if self.capacity else 0.0,
        }


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of the run in GiB: of the CUDA allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return {
            "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "peak_memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    # Linux counts in KiB, macOS in bytes.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return {"peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}


class _AboveBar:
    """A stream to the terminal of a bar: its lines appear above the bar, never inside it."""

    def __init__(self, stream: TextIO, bar: tqdm) -> None:
        self._stream, self._bar, self._begun = stream, bar, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the lines that are whole and keeps the beginning of the next one."""
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        if end:
            self._bar.clear()
            self._stream.write(lines + end)
            self._stream.flush()
            self._bar.refresh()
        return len(text)


class StepMeter:
    """Times the phases of a run and shows one line of progress.

    On a terminal (stderr) that line is a bar, and whatever is printed until ``close`` appears above
    it. Where stdout is no terminal, it gets one line every ``log_every_n_steps``, bar or not: so
    ``tune run ... > log`` shows the bar and fills the log. Ranks other than 0 show nothing.

    Args:
        ranks: where this process stands.
        total_steps: optimizer steps of the whole run.
        done_steps: steps already done before a resume.
        log_every_n_steps: how often a line goes to a stdout that is no terminal.
    """

    def __init__(
        self, ranks: Ranks, *, total_steps: int, done_steps: int = 0, log_every_n_steps: int = 1
    ) -> None:
        self._ranks = ranks
        self._every = log_every_n_steps
        self._total = total_steps
        self._shows_bar = ranks.is_first and sys.stderr.isatty()
        self._writes_lines = not (self._shows_bar and sys.stdout.isatty())
        self._bar = tqdm(
            total=total_steps,
            initial=done_steps,
            disable=not self._shows_bar,
            dynamic_ncols=True,
            unit="step",
            bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
        )
        self._streams = (sys.stdout, sys.stderr)
        if self._shows_bar:
            # What goes to the same terminal, a warning of a library too, is written above the bar.
            sys.stderr = cast(TextIO, _AboveBar(sys.stderr, self._bar))
            if sys.stdout.isatty():
                sys.stdout = cast(TextIO, _AboveBar(sys.stdout, self._bar))
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.totals = StepCounts()
        #: Losses of the first and the last step of this process, empty before there is one.
        self.losses: tuple[()] | tuple[float, float] = ()
        self.step_seconds = 0.0
        self.last_step = done_steps
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._step_start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a phase; CUDA work is timed by events, without waiting."""
        if self._ranks.device.type == "cuda" and name not in ("data",):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def timed(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Passes steps on, timing from the request for a step's data; that wait is phase "data"."""
        steps = iter(steps)
        while True:
            self._step_start = time.perf_counter()
            step = next(steps, None)
            if step is None:
                return
            self.seconds["data"] += time.perf_counter() - self._step_start
            yield step

    def finish_step(self, run: Run, step: Step, values: Mapping[str, float]) -> None:
        """Closes a step, whose loss has been read: shows it and logs it.

        Args:
            run: has the metric logger.
            step: the step, with the counts of all ranks.
            values: loss, learning rate and whatever else is to be logged.
        """
        seconds = time.perf_counter() - self._step_start
        self._read_events()
        self.totals.add(step.counts)
        self.losses = (self.losses[0] if self.losses else values["loss"], values["loss"])
        self.step_seconds += seconds
        self.last_step = step.position.step
        rates, number = step.counts.rates(seconds), step.position.step
        line = (
            f"loss {values['loss']:.4f} | {rates['real_tokens_per_second']:.0f} real tokens/s "
            f"| fill {100 * rates['fill']:.1f}%"
        )
        due = number % self._every == 0
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update(1)
        if due and self._writes_lines:
            run.say(f"step {number}/{self._total} epoch {step.position.epoch + 1} | {line}")
        if not step.counts.trained:
            run.say(f"warning: step {number} has no trained target; no weight moved.")
        if due:
            run.log({**values, **rates, **peak_memory(self._ranks.device)}, number)

    def _read_events(self, *, wait: bool = False) -> None:
        """Adds the times that the device has finished with; the others stay for the next reading.

        Asking for the time between events that have not come yet is an error, and waiting for them
        after each step would leave the device without work.
        """
        pending = []
        for name, start, end in self._events:
            if wait:
                end.synchronize()
            if end.query():
                self.seconds[name] += start.elapsed_time(end) / 1000
            else:
                pending.append((name, start, end))
        self._events = pending

    def summary(self) -> dict[str, float]:
        """Steps done, real tokens/s over this run, and each phase's share of the step time."""
        self._read_events(wait=True)
        seconds = max(self.step_seconds, 1e-9)
        shares = {f"share_{name}": spent / seconds for name, spent in self.seconds.items()}
        speed = self.totals.real / seconds
        return {"steps": self.last_step, "real_tokens_per_second": speed, **shares}

    def close(self) -> None:
        """Finishes the bar, and gives stdout and stderr back."""
        self._bar.close()
        if self._shows_bar:
            sys.stdout, sys.stderr = self._streams
