"""The reference of ``recipes/check_packing.py``: documents one at a time, before any packing.

It is the user's model as torchtune built it: no mask, no positions, plain cross entropy. Its own
rounding is measured beside it: ``measure_alone`` runs every document a second time, in another
shape and under an explicit causal mask. A packed run may differ by a few times that. The measure
never sees a pack, so a leak cannot raise its own limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtune_packing.loss import Reduction
from torchtune_packing.training.check_data import Document
from torchtune_packing.types import IGNORE_INDEX

__all__ = [
    "Alone",
    "final_hidden",
    "gradient_distance",
    "gradient_norm",
    "logit_difference",
    "measure_alone",
    "rotary_table_size",
    "take_gradients",
]

#: A packed run may differ from the single documents by this many times the model's own rounding.
_FACTOR = 4.0
#: Most that is believed of a measured rounding, in units of the dtype's own.
_CAP = 32.0
_TRAILING = 16


def rotary_table_size(model: nn.Module) -> int | None:
    """Positions that the smallest rotary table of a model holds; None without one."""
    sizes = [
        module.cache.shape[0]
        for module in model.modules()
        if hasattr(module, "build_rope_cache") and isinstance(module.cache, torch.Tensor)
    ]
    return min(sizes, default=None)


def final_hidden(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The last hidden state ``[b, s, dim]``, without the cost of logits for all of it."""
    caught: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        caught.append(args[0])
        return (args[0][:, :1],)

    handle = model.norm.register_forward_pre_hook(keep, prepend=True)
    try:
        model(tokens, **kwargs)
    finally:
        handle.remove()
    return caught[0]


@dataclass
class Alone:
    """The documents one at a time through the plain model.

    Attributes:
        hidden: last hidden state of each document, ``[n, dim]``.
        loss: of all documents.
        divisor: what the sum of the losses was divided by.
        grads: gradient of each trained parameter, on the CPU.
        logits_limit: most by which a logit may differ.
        loss_limit: most by which the loss may differ, relative.
        grads_limit: most by which the gradients may differ, relative.
    """

    hidden: list[torch.Tensor]
    loss: float
    divisor: int
    grads: dict[str, torch.Tensor]
    logits_limit: float = 0.0
    loss_limit: float = 0.0
    grads_limit: float = 0.0


def _alone(
    model: Any, documents: list[Document], reduction: Reduction, trailing: int | None
) -> tuple[Alone, list[float]]:
    """One pass over the documents; with ``trailing`` in the second form, more tokens behind."""
    device = next(model.parameters()).device
    trained = [document.num_trained for document in documents]
    divisor = max(1, sum(trained) if reduction == "token" else sum(n > 0 for n in trained))
    hidden, losses = [], []
    model.zero_grad(set_to_none=True)
    for document, count in zip(documents, trained, strict=True):
        tokens, n = document.tokens.to(device), len(document.tokens)
        if trailing is None:
            h = final_hidden(model, tokens[None])
        else:
            tokens = torch.cat([tokens, tokens[:1].expand(trailing)])
            s = len(tokens)
            mask = torch.ones(1, s, s, dtype=torch.bool, device=device).tril()
            position = torch.arange(s, device=device)[None]
            h = final_hidden(model, tokens[None], input_pos=position, mask=mask)[:, :n]
        hidden.append(h[0].detach())
        if not count:
            losses.append(0.0)
            continue
        logits = model.unembed(h)[0, :-1]
        targets = document.labels[1:].to(device)
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)
        loss = loss / (divisor if reduction == "token" else divisor * count)
        loss.backward()
        losses.append(loss.item())
    return Alone(hidden, sum(losses), divisor, take_gradients(model)), losses


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model by parameter name, on the CPU; the model's own are dropped."""
    found = {
        name: parameter.grad.detach().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    # Compiling and checkpointing wrap modules, which shows in the names.
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): value
        for name, value in found.items()
    }


def gradient_distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two sets of gradients, relative to the second."""
    difference = size = 0.0
    for name in ours.keys() | theirs.keys():
        a, b = (grads.get(name, torch.zeros(())).float() for grads in (ours, theirs))
        difference += float((a - b).square().sum())
        size += float(b.square().sum())
    return (difference / size) ** 0.5 if size else float(difference > 0)


def gradient_norm(grads: dict[str, torch.Tensor]) -> float:
    """Norm over all parameters."""
    return float(sum(float(g.float().square().sum()) for g in grads.values()) ** 0.5)


def measure_alone(
    model: Any, documents: list[Document], *, dtype: torch.dtype, reduction: Reduction = "token"
) -> Alone:
    """Runs every document alone, forward and backward, and measures the model's own rounding.

    Args:
        model: a torchtune decoder as torchtune built it, in eval mode; attention not installed.
        documents: the documents.
        dtype: what the model computes in.
        reduction: of the loss, as in training.
    """
    table = rotary_table_size(model)
    longest = max(len(document.tokens) for document in documents)
    trailing = _TRAILING if table is None else max(0, min(_TRAILING, table - longest))
    other, other_losses = _alone(model, documents, reduction, trailing)
    alone, losses = _alone(model, documents, reduction, None)
    differences, scales = zip(
        *(logit_difference(model, a, b) for a, b in zip(alone.hidden, other.hidden, strict=True)),
        strict=True,
    )
    eps, scale = torch.finfo(dtype).eps, max(scales)

    def limit(measured: float, unit: float) -> float:
        return _FACTOR * min(max(measured, unit), _CAP * unit)

    alone.logits_limit = limit(max(differences), eps * scale)
    # Document by document: over all of them, differences of both signs would cancel.
    apart = sum(abs(a - b) for a, b in zip(losses, other_losses, strict=True))
    alone.loss_limit = limit(apart / max(alone.loss, eps), eps)
    alone.grads_limit = limit(gradient_distance(other.grads, alone.grads), eps)
    return alone


@torch.no_grad()
def logit_difference(model: Any, ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Largest difference of the logits of two hidden states ``[n, dim]``, and largest logit."""
    difference = scale = 0.0
    for a, b in zip(ours.split(512), theirs.split(512), strict=True):
        left, right = model.unembed(a[None]), model.unembed(b[None])
        difference = max(difference, float((left - right).abs().max()))
        scale = max(scale, float(right.abs().max()))
    return difference, scale
