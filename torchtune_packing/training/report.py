"""What a run says when something is wrong with its loss, and when it is over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_packing.training.example import ShownExample
from torchtune_packing.training.metrics import StepMeter
from torchtune_packing.training.run import Run

if TYPE_CHECKING:
    from torchtune_packing.training.data import Position, TrainingData

__all__ = ["check_finite", "final_report", "report_validation"]

#: Above this share of the step time, waiting for data or masks is worth a word.
_NOTABLE_SHARE = 0.05


def check_finite(loss: float, position: Position, data: TrainingData) -> None:
    """Stops before a loss that is no number reaches the weights.

    Raises:
        FloatingPointError: naming the step and the packs or samples that it was made of.
    """
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"The loss of step {position.step} is {loss} (epoch {position.epoch}, "
            f"{data.rows_of(position)}); no weight was changed in this step. Lower the learning "
            "rate, or try attention_backend=sdpa."
        )


def report_validation(run: Run, loss: float | None, step: int) -> None:
    """Logs and prints a validation loss in the middle of a run; None, without a set, says nothing.

    Args:
        run: the surroundings of the run.
        loss: mean over the trained targets of the validation set.
        step: optimizer steps done.
    """
    if loss is not None:
        run.log({"val_loss": loss}, step)
        run.say(f"validation loss: {loss:.4f} after {step} steps")


def final_report(
    run: Run,
    meter: StepMeter,
    losses: tuple[float | None, float | None],
    example: ShownExample,
    checkpoint: Path,
) -> int:
    """Prints what the run achieved, on the first rank.

    Args:
        run: the surroundings of the run.
        meter: steps, speed, the share of each phase and the training losses.
        losses: validation loss before and after training, None where there is none.
        example: the held-out document with its answers.
        checkpoint: the last checkpoint.

    Returns:
        The exit code: 1 when ``require_lower_val_loss`` is set and the loss did not fall.
    """
    loss_before, loss_after = losses
    summary = meter.summary()
    step = int(summary["steps"])
    for line in example.lines():
        run.say(line)
    shares = {k.removeprefix("share_"): v for k, v in summary.items() if k.startswith("share_")}
    run.say(
        f"speed: {summary['real_tokens_per_second']:.0f} real tokens/s (padding not counted); step "
        "time: " + ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares.items())
    )
    if shares.get("data", 0) > _NOTABLE_SHARE:
        workers = max(2, 2 * int(run.cfg.get("num_workers", None) or 0))
        run.say(f"waiting for data took over 5% of the time: try num_workers={workers}.")
    if shares.get("mask", 0) > _NOTABLE_SHARE:
        run.say("masks took over 5% of the time: try another attention_backend.")
    if meter.losses:
        first, last = meter.losses
        run.say(f"training loss: {first:.4f} in the first step, {last:.4f} in the last")
    if loss_after is not None:
        run.log({"val_loss": loss_after}, step)
        before = "" if loss_before is None else f"{loss_before:.4f} before, "
        run.say(f"validation loss: {before}{loss_after:.4f} after {step} steps")
    run.say(f"checkpoint: {checkpoint}")
    run.say(f"to go on from it, with more epochs: {run.resume_command()} epochs=<n>")
    if run.cfg.get("require_lower_val_loss", False) and loss_before is not None:
        if loss_after is None or not loss_after < loss_before:
            run.say(
                "error: the validation loss did not fall; train for more steps or at another "
                "learning rate, or set require_lower_val_loss=False."
            )
            return 1
    return 0
