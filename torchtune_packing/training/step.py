"""The two halves of an optimizer step that every recipe shares: a loss, and an update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtune_packing.attention import InstalledAttention
from torchtune_packing.loss import LossRows, TrainedRows, sum_cross_entropy
from torchtune_packing.training.loading import MicroBatch
from torchtune_packing.training.metrics import StepMeter
from torchtune_packing.training.parallel import Ranks

if TYPE_CHECKING:
    from torchtune_packing.training.data import Step

__all__ = ["PackedForward", "accumulate_gradients", "update_weights"]


class PackedForward:
    """From a CPU batch to its summed loss: the mask is made here, on the device, once per batch.

    Args:
        model: a torchtune decoder whose attention has been installed.
        attention: what ``install_attention`` returned; makes the
            masks, and its device is where everything goes.
        offloading: context of activation offloading.
        meter: times mask and forward; None times nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: InstalledAttention,
        *,
        offloading: AbstractContextManager[Any] | None = None,
        meter: StepMeter | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.meter = meter
        self._offloading = offloading or nullcontext()
        self._trained_rows = TrainedRows(model)

    def _phase(self, name: str) -> AbstractContextManager[Any]:
        if self.meter is None or not self.model.training:
            return nullcontext()
        return self.meter.phase(name)

    def logits(
        self,
        tokens: torch.Tensor,
        input_pos: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        real_lengths: torch.Tensor | None = None,
    ) -> Any:
        """Logits of chosen rows of a batch.

        Args:
            tokens: int64 ``[b, s]``, on the CPU.
            input_pos: int64 ``[b, s]``, on the CPU.
            seq_lens: int32 ``[b, d]``, on the CPU; rows sum to s.
            rows: int64 ``[r]``, positions in the flattened batch ``[b * s]``; on the device, where
                ``LossRows.to`` brings them without waiting.
            real_lengths: int64 ``[b]``, tokens in front of the padding tail.

        Returns:
            Float32 ``[1, r, v]``, or its chunks in the model's dtype when the model makes chunks.
        """
        device = self.attention.device
        tokens = tokens.to(device, non_blocking=True)
        input_pos = input_pos.to(device, non_blocking=True)
        with self._phase("mask"):
            mask = self.attention.prepare(seq_lens, tokens.shape[1], real_lengths=real_lengths)
        # Only rows with a target reach the output projection; other logits would go unread.
        with self._phase("forward"), self._trained_rows.only(rows.to(device, non_blocking=True)):
            with self._offloading if self.model.training else nullcontext():
                return self.model(tokens, input_pos=input_pos, mask=mask)

    def loss(self, micro_batch: MicroBatch, rows: LossRows) -> torch.Tensor:
        """Sum of the cross entropy over the trained rows of a batch, not divided by anything.

        Raises:
            ValueError: if the batch has no ``seq_lens``: without them nothing keeps documents
                apart.
        """
        batch = micro_batch.batch
        if "seq_lens" not in batch:
            raise ValueError(
                f"The batch has {', '.join(batch)} and no seq_lens, so its documents could not be "
                "kept apart; collate it with mask=None, which keeps seq_lens."
            )
        rows = rows.to(self.attention.device)
        logits = self.logits(
            batch["tokens"],
            batch["input_pos"],
            batch["seq_lens"],
            rows.rows,
            micro_batch.real_lengths,
        )
        with self._phase("forward"):
            return sum_cross_entropy(logits, rows.targets, rows.weights)


def accumulate_gradients(
    step: Step,
    loss_of: Callable[[MicroBatch, LossRows], torch.Tensor],
    *,
    ranks: Ranks,
    meter: StepMeter,
) -> float:
    """Runs the micro-batches of a step one after the other, forward and backward.

    Each summed loss is divided by the one count of the whole step before its backward, so that the
    gradients add up to those of a single batch of all documents of all ranks.

    Args:
        step: micro-batches and the counts of all ranks.
        loss_of: summed loss of a micro-batch over its trained rows (``PackedForward.loss``, or
            your own).
        ranks: the processes of the run.
        meter: times the backward.

    Returns:
        The loss of the step, the same on every rank; 0.0 when nothing in it is trained.
    """
    divisor = max(step.counts.divisor, 1)
    losses = []
    for micro_batch, rows in step:
        loss = loss_of(micro_batch, rows)
        with meter.phase("backward"):
            # FSDP averages gradients over the ranks; the divisor is that of all ranks already.
            (loss * (ranks.world_size / divisor)).backward()
        losses.append(loss.detach())
    # Read back once: each reading waits until the device has caught up.
    return ranks.sum(sum(torch.stack(losses).tolist()))[0] / divisor


def update_weights(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    *,
    has_targets: bool,
    clip_grad_norm: float | str | None = None,
) -> dict[str, float]:
    """Clips the gradients and moves the weights, unless nothing was trained.

    Args:
        model: its gradients are those of the whole optimizer step.
        optimizer: steps, then its gradients are dropped.
        scheduler: steps after the optimizer; None for a constant rate.
        has_targets: False when the step had no trained target on any rank. Then no weight moves:
            weight decay and momentum would move them even with zero gradients.
        clip_grad_norm: largest norm; "inf" only measures; None does neither.

    Returns:
        ``{"grad_norm": norm before clipping}``, empty when it was not asked for.
    """
    measured = {}
    if clip_grad_norm is not None:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), float(clip_grad_norm))
        measured["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if has_targets:
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return measured
