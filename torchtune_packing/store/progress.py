"""A progress bar that stays readable in a terminal and in a log file."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

__all__ = ["Progress", "is_main_process"]

#: Seconds between two lines where the output is not a terminal.
_LOG_INTERVAL = 30.0


def is_main_process() -> bool:
    """True on rank 0, and wherever no process group and no launcher is in sight."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


class Progress:
    """Counts samples and shows how many are done and how long the rest will take.

    On a terminal this is one tqdm bar as wide as the window. Anywhere else (a file, a job's log) it
    is one plain line every 30 seconds, so that a log holds no carriage returns and short builds
    print nothing.

    Args:
        total: samples to count, None when not known beforehand.
        description: what is being done.
        done: samples that were done before, which say nothing about how long the rest will take.
        enabled: False for a counter that prints nothing (other ranks, tests).
    """

    def __init__(
        self, total: int | None, description: str, *, done: int = 0, enabled: bool = True
    ) -> None:
        self.total = total
        self.done = self._done_before = done
        self.description = description
        self._enabled = enabled
        self._bar = None
        self._start = self._last = time.monotonic()
        if enabled and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=description,
                unit=" samples",
                unit_scale=True,
                dynamic_ncols=True,
            )

    def update(self, num_samples: int) -> None:
        """Adds ``num_samples`` to the count and shows it when it is time to."""
        self.done += num_samples
        if self._bar is not None:
            self._bar.update(num_samples)
        elif self._enabled:
            now = time.monotonic()
            if now - self._last >= _LOG_INTERVAL:
                self._last = now
                print(self._line(now - self._start), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        rate = (self.done - self._done_before) / seconds
        if self.total is None:
            return f"{self.description}: {self.done:,} samples in {seconds:,.0f} s"
        left = (self.total - self.done) / rate if rate else float("inf")
        return (
            f"{self.description}: {self.done:,} of {self.total:,} samples in {seconds:,.0f} s, "
            f"about {left:,.0f} s left"
        )

    def __enter__(self) -> Progress:
        """Starts nothing; there for the ``with`` statement."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()
