"""Cross entropy that is the same number however the documents were batched.

The loss of an optimizer step is a sum over its trained targets divided by one count, taken over all
micro-batches and all ranks before the first backward. A mean of means would weigh a short
micro-batch like a long one; a sum over one count cannot, so packed, unpacked, accumulated and
sharded runs agree.

Two reductions:

    "token"     every trained target weighs 1            count = trained targets
    "document"  every document weighs 1, its targets     count = documents with a trained target
                1 / (trained targets of the document)

Only the rows of the hidden state that have a target go through the final norm and the output
projection (``TrainedRows``). Prompt and padding rows would give logits that nothing reads:
with a vocabulary of 49,152 they are the largest activation of a small model. Both layers work row
by row, so the loss and its gradients are unchanged.

All targets here are aligned: ``targets[t]`` is what position t must predict (``shift_labels=True``
of the collates).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchtune_packing.masks import document_ids
from torchtune_packing.types import IGNORE_INDEX

__all__ = ["LossRows", "Reduction", "TrainedRows", "loss_rows", "sum_cross_entropy"]

Reduction = Literal["token", "document"]


class LossRows:
    """The trained targets of one batch, flattened: which rows to keep, and how to weigh them.

    Attributes:
        rows: int64 ``[r]``, positions in the flattened batch ``[b * s]`` that have a target.
        targets: int64 ``[r]``, the token each of them must predict.
        weights: float32 ``[r]``, or None when all weigh 1.
        count: what the batch adds to the divisor of its optimizer step.
        num_trained: r, as a Python int.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        count: int,
    ) -> None:
        self.rows = rows
        self.targets = targets
        self.weights = weights
        self.count = count
        self.num_trained = rows.numel()

    def to(self, device: torch.device) -> LossRows:
        """Copies the three tensors to a device without waiting for it."""

        def moved(x: torch.Tensor) -> torch.Tensor:
            # A copy from memory that is not pinned waits for the device, whatever it is told.
            if device.type == "cuda" and x.device.type == "cpu":
                x = x.pin_memory()
            return x.to(device, non_blocking=True)

        weights = None if self.weights is None else moved(self.weights)
        return LossRows(moved(self.rows), moved(self.targets), weights, self.count)


def loss_rows(
    targets: torch.Tensor,
    seq_lens: torch.Tensor,
    reduction: Reduction = "token",
    ignore_index: int = IGNORE_INDEX,
) -> LossRows:
    """Finds the rows of a batch that are trained, on the CPU, before anything reaches the device.

    Args:
        targets: int64 ``[b, s]``, aligned; ``ignore_index`` = not trained.
        seq_lens: int ``[b, d]``, zero-filled on the right; rows sum to s.
        reduction: "token" or "document", see the module docstring.
        ignore_index: the label that is skipped.

    Returns:
        The trained rows with their weights and their count.

    Raises:
        ValueError: if ``reduction`` is neither "token" nor "document".
    """
    flat = targets.reshape(-1)
    rows = torch.nonzero(flat != ignore_index).squeeze(1)
    kept = flat[rows]
    if reduction == "token":
        return LossRows(rows, kept, None, rows.numel())
    if reduction != "document":
        raise ValueError(
            f'loss_reduction is {reduction!r}; it must be "token" (every trained target weighs the '
            'same) or "document" (every document weighs the same).'
        )
    b, s = targets.shape
    ids = document_ids(seq_lens, s).to(torch.int64)
    ids = (ids + torch.arange(b).unsqueeze(1) * (seq_lens.shape[1] + 1)).reshape(-1)[rows]
    per_document = torch.bincount(ids, minlength=1)
    weights = 1.0 / per_document[ids].to(torch.float32)
    return LossRows(rows, kept, weights, int((per_document > 0).sum()))


def sum_cross_entropy(
    logits: torch.Tensor | Sequence[torch.Tensor],
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of the cross entropy of each row, in float32 or better.

    Args:
        logits: float ``[..., r, v]``, or its chunks along r (``set_num_output_chunks``); the sum
            does not depend on how many there are, and an empty chunk adds nothing.
        targets: int64 ``[r]``; every one is trained (none is ``IGNORE_INDEX``).
        weights: float32 ``[r]``, or None for ones.

    Returns:
        A scalar, 0 for no rows; still attached to the graph then, so that every rank of a sharded
        model runs the same backward.

    Raises:
        ValueError: if there are not as many logit rows as targets.
    """
    chunks = [logits] if isinstance(logits, torch.Tensor) else list(logits)
    chunks = [chunk.reshape(-1, chunk.shape[-1]) for chunk in chunks]
    rows = sum(chunk.shape[0] for chunk in chunks)
    if rows != targets.numel():
        raise ValueError(
            f"The model gave {rows} rows of logits for {targets.numel()} targets; wrap the forward "
            "in TrainedRows.only(rows), or index the logits with LossRows.rows."
        )
    total = chunks[0].new_zeros((), dtype=torch.promote_types(chunks[0].dtype, torch.float32))
    start = 0
    for chunk in chunks:
        stop = start + chunk.shape[0]
        upcast = chunk.to(total.dtype)
        if weights is None:
            total = total + F.cross_entropy(upcast, targets[start:stop], reduction="sum")
        else:
            each = F.cross_entropy(upcast, targets[start:stop], reduction="none")
            total = total + (each * weights[start:stop]).sum()
        start = stop
    return total


class TrainedRows:
    """Narrows a torchtune decoder's final norm and output projection to chosen rows.

    A hook on ``model.norm``, so that state dict, FSDP and tied embeddings are untouched:

        trained_rows = TrainedRows(model)
        with trained_rows.only(rows):
            logits = model(tokens, input_pos=input_pos, mask=mask)   # [1, r, v]
        logits = model(tokens, ...)                                  # [b, s, v] as ever

    Args:
        model: a torchtune ``TransformerDecoder``, whose ``norm`` sees the last hidden state.

    Raises:
        ValueError: if the model has no ``norm`` module.
    """

    def __init__(self, model: nn.Module) -> None:
        norm = getattr(model, "norm", None)
        if not isinstance(norm, nn.Module):
            raise ValueError(
                f"{type(model).__name__} has no final `norm` module to narrow; use a torchtune "
                "TransformerDecoder, or index the full logits with LossRows.rows."
            )
        self._rows: torch.Tensor | None = None
        self._handle = norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._rows is None:
            return args
        hidden = args[0]
        kept = hidden.flatten(0, 1).index_select(0, self._rows)
        return (kept.unsqueeze(0), *args[1:])

    @contextmanager
    def only(self, rows: torch.Tensor) -> Iterator[None]:
        """Keeps only these rows (int64 ``[r]`` into the flattened ``[b * s]``) while it is open."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def remove(self) -> None:
        """Takes the hook off the model again."""
        self._handle.remove()
