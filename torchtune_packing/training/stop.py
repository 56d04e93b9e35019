"""A polite end: SIGTERM and Ctrl-C let the running step finish and be saved."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Notes a SIGTERM or Ctrl-C so that the training loop can end between two steps.

    A second Ctrl-C interrupts at once, as Python does by default. Schedulers send SIGTERM to all
    processes of a job, a terminal sends Ctrl-C to all of them: any rank's request stops all, and
    rank 0 alone says so.

    Attributes:
        signal: the signal received, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt
        repeated, self.signal = self.signal is not None, number
        if repeated or os.environ.get("RANK", "0") != "0":
            return
        name = signal.Signals(number).name
        try:
            print(f"{name}: finishing this step, then saving.", file=sys.stderr, flush=True)
        except RuntimeError:
            pass  # the signal came while the same stream was being written to; the run goes on

    def __bool__(self) -> bool:
        """True once a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """0 after SIGTERM (the job was asked to leave and did), 130 after Ctrl-C."""
        return 130 if self.signal == signal.SIGINT else 0

    def restore(self) -> None:
        """Puts the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
