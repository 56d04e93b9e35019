"""Validation loss: a sum over every trained token of every document, once, divided once."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from torchtune_packing.loss import Reduction, loss_rows
from torchtune_packing.training.loading import EvenBatches, MicroBatch
from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.step import PackedForward

__all__ = ["evaluate"]


def evaluate(
    forward: PackedForward,
    loader: DataLoader[MicroBatch] | None,
    ranks: Ranks,
    reduction: Reduction = "token",
) -> float | None:
    """Loss per trained token (or per document) over a whole validation set.

    The same number on every rank, for every batch size, packed or not: batches are summed, never
    averaged, and none is dropped. The model is left in the mode it was in.

    Args:
        forward: the model with its attention.
        loader: batches of an ``EvenBatches`` sampler, or
            None when there is no validation set.
        ranks: the processes of the run.
        reduction: "token" or "document".

    Returns:
        The loss; None without a set, NaN when the set has no trained token.
    """
    if loader is None:
        return None
    batches = loader.batch_sampler
    assert isinstance(batches, EvenBatches)
    was_training = forward.model.training
    forward.model.eval()
    total, divisor = 0.0, 0.0
    with torch.no_grad():
        for index, micro_batch in enumerate(loader):
            batch = micro_batch.batch
            rows = loss_rows(batch["labels"], batch["seq_lens"], reduction)
            loss = forward.loss(micro_batch, rows).item()
            if index < batches.num_counted:
                total += loss
                divisor += rows.count
    forward.model.train(was_training)
    total, divisor = ranks.sum(total, divisor)
    return total / divisor if divisor else float("nan")
