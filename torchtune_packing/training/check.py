"""Measures on a real model that packed equals unpacked; ``recipes/check_packing.py`` reports it.

Logits, loss and gradients of packs are compared with those of the single documents, within a few
times the model's own rounding (``torchtune_packing.training.check_reference``).

Whether documents see each other is not a question of rounding. When a token is replaced, what must
not see it computes the same numbers in the same order, so it must come out the same to the last bit
(or as near as the same pack run twice).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_packing.attention_choice import attention_layers
from torchtune_packing.loss import Reduction, loss_rows
from torchtune_packing.training.check_data import CheckBatch, Line
from torchtune_packing.training.check_reference import (
    Alone,
    final_hidden,
    gradient_distance,
    gradient_norm,
    logit_difference,
    take_gradients,
)
from torchtune_packing.training.loading import CountedCollate, MicroBatch
from torchtune_packing.training.step import PackedForward
from torchtune_packing.types import IGNORE_INDEX

__all__ = [
    "Pattern",
    "check_backend",
    "check_leak",
    "check_logits",
    "check_loss_and_gradients",
    "check_pattern",
    "measure_pattern",
]

_PROBED_DOCUMENTS = 8
_PROBES = 24


@torch.no_grad()
def _packed_hidden(
    forward: PackedForward, micro_batch: MicroBatch, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Last hidden state of a batch ``[b, s, dim]``, with other tokens if given."""
    batch, attention = micro_batch.batch, forward.attention
    tokens = batch["tokens"] if tokens is None else tokens
    mask = attention.prepare(
        batch["seq_lens"], tokens.shape[1], real_lengths=micro_batch.real_lengths
    )
    positions = batch["input_pos"].to(attention.device)
    return final_hidden(forward.model, tokens.to(attention.device), input_pos=positions, mask=mask)


def check_logits(forward: PackedForward, batches: list[CheckBatch], alone: Alone) -> list[Line]:
    """Logits of every document in its pack against alone; and of one document in two places."""
    model, references, worst = forward.model, iter(alone.hidden), 0.0
    for item in batches:
        hidden = _packed_hidden(forward, item.micro_batch)
        for document in item.documents:
            found = logit_difference(model, hidden[document.place], next(references))[0]
            worst = max(worst, found) if found == found else float("inf")  # NaN is no small number
    documents = [document for item in batches for document in item.documents]
    documents.sort(key=lambda document: len(document.tokens))
    twice, other = documents[len(documents) // 2], documents[-1]
    row = [{"tokens": d.tokens, "labels": d.labels} for d in (twice, other, twice)]
    micro_batch = CountedCollate(packed=False, padding_idx=0, ignore_idx=IGNORE_INDEX)(row)
    hidden, n = _packed_hidden(forward, micro_batch)[0], len(twice.tokens)
    second = n + len(other.tokens)
    apart = logit_difference(model, hidden[:n], hidden[second : second + n])[0]
    return [
        _within(
            "logits, packed - alone",
            worst,
            alone.logits_limit,
            "A document's logits depend on what it is packed with.",
        ),
        _within(
            "same document, two places",
            apart,
            alone.logits_limit,
            "The same document gives different logits in two places of a pack.",
        ),
    ]


def _within(name: str, found: float, limit: float, note: str) -> Line:
    passed = found <= limit
    return Line(name, f"{found:.1e}", f"{limit:.1e}", passed, "" if passed else note)


def check_loss_and_gradients(
    forward: PackedForward, batches: list[CheckBatch], alone: Alone, reduction: Reduction
) -> list[Line]:
    """Loss and gradients of the packs, by the recipes' own step, against the single documents."""
    total = 0.0
    forward.model.zero_grad(set_to_none=True)
    for item in batches:
        batch = item.micro_batch.batch
        rows = loss_rows(batch["labels"], batch["seq_lens"], reduction)
        loss = forward.loss(item.micro_batch, rows) / alone.divisor
        loss.backward()
        total += loss.item()
    grads = take_gradients(forward.model)
    apart = abs(total - alone.loss) / max(alone.loss, 1e-12)
    norms = [gradient_norm(grads), gradient_norm(alone.grads)]
    norm_apart = abs(norms[0] - norms[1]) / max(norms[1], 1e-12)
    loss_note = f"The loss is {total:.6f} packed and {alone.loss:.6f} alone."
    norm_note = f"The gradient norm is {norms[0]:.6g} packed and {norms[1]:.6g} alone."
    return [
        _within("loss, relative", apart, alone.loss_limit, loss_note),
        _within("gradient norm, relative", norm_apart, alone.grads_limit, norm_note),
        _within(
            "gradients, relative",
            gradient_distance(grads, alone.grads),
            alone.grads_limit,
            "The gradients of the packs are not those of the single documents.",
        ),
    ]


def _replaced(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Other tokens in place of these, every one of them different."""
    vocabulary = min(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return (tokens + 1 + vocabulary // 3) % vocabulary


def _shift(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """By how much each position differs, ``[...]`` of ``[..., dim]``; NaN counts as infinite."""
    return (ours.float() - theirs.float()).abs().amax(dim=-1).nan_to_num(torch.inf).cpu()


def check_leak(forward: PackedForward, batches: list[CheckBatch]) -> Line:
    """Replaces one document in every row: everything else must not move, to the last bit."""
    leaked = noise = 0.0
    replaced, still, leak_at = 0, 0, ""
    for item in batches:
        micro_batch = item.micro_batch
        tokens = micro_batch.batch["tokens"].clone()
        inside = torch.zeros(tokens.shape, dtype=torch.bool)
        for row in range(tokens.shape[0]):
            here = [document for document in item.documents if document.row == row]
            if len(here) > 1:
                document = here[(len(here) - 1) // 2]  # with a neighbour behind it
                tokens[document.place] = _replaced(forward.model, document.tokens)
                inside[document.place] = True
        replaced += int(inside.any(dim=1).sum())
        before = _packed_hidden(forward, micro_batch)
        again = _packed_hidden(forward, micro_batch)
        noise = max(noise, float(_shift(again, before).max()))
        moved = _shift(_packed_hidden(forward, micro_batch, tokens), before)
        still += int((moved[inside] == 0).sum() * 2 > inside.sum())
        outside = float(moved[~inside].max()) if bool((~inside).any()) else 0.0
        if outside > noise and not leak_at:
            leak_at = _first_leak(forward, micro_batch, tokens, inside)
        leaked = max(leaked, outside)
    name = "leak into other documents"
    if not replaced:
        note = "No pack holds two documents, so there is nothing to keep apart; raise "
        note += "dataset.max_seq_len or check_packs."
        return Line(name, "not measured", "", False, note)
    if still:
        note = "Replacing a document did not change the document itself."
        return Line(name, "nothing moved", "", False, note)
    note = f"Another document's tokens are seen, first in {leak_at}." if leak_at else ""
    return Line(name, f"{leaked:.1e}", f"{noise:.1e}", leaked <= noise, note)


@contextmanager
def _layer_hooks(model: Any, pre: Any = None, post: Any = None) -> Iterator[None]:
    """Calls ``pre(name, kwargs)`` and ``post(name, output)`` around every attention layer."""
    handles = []
    for name, layer in attention_layers(model).items():
        if pre is not None:
            handles.append(
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: pre(name, kwargs), with_kwargs=True
                )
            )
        if post is not None:
            handles.append(
                layer.register_forward_hook(lambda _, args, out, name=name: post(name, out))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_leak(
    forward: PackedForward, micro_batch: MicroBatch, tokens: torch.Tensor, inside: torch.Tensor
) -> str:
    """Name of the first attention layer whose output moves outside the replaced documents."""
    if any(getattr(m, "_compiled_call_impl", None) for m in forward.model.modules()):
        return "some layer (set compile=False to see which)"
    seen: list[dict[str, torch.Tensor]] = []

    def keep(name: str, out: torch.Tensor) -> None:
        # One number per position instead of the whole output: equal outputs give equal numbers.
        weights = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device)
        seen[-1][name] = (out.float() * weights).sum(dim=-1).cpu()

    with _layer_hooks(forward.model, post=keep):
        for text in (micro_batch.batch["tokens"], tokens):
            seen.append({})
            _packed_hidden(forward, micro_batch, text)
    for name, before in seen[0].items():
        if bool((before != seen[1][name])[~inside].any()):
            return name
    return "no attention layer; look at what else the model does"


class _KernelsSeen(TorchDispatchMode):
    """Notes which attention operators torch really dispatches in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ""
        self.names: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.name()) if hasattr(func, "name") else str(func)
        if "attention" in name or "attn" in name:
            kernel = name.split("::")[-1].split(".")[0].strip("_")
            self.names.setdefault(self.layer, set()).add(kernel)
        return func(*args, **(kwargs or {}))


def check_backend(
    forward: PackedForward, batches: list[CheckBatch], asked: str, *, compiled: bool
) -> Line:
    """The backend that was chosen ran in every layer, under the batch's own mask.

    Args:
        forward: model and attention.
        batches: one of them is run.
        asked: ``attention_backend`` of the config.
        compiled: whether layers are compiled; what happens inside them is not observed then.
    """
    attention, micro_batch = forward.attention, batches[0].micro_batch
    masks: dict[str, int] = {}
    kernels = _KernelsSeen()
    if compiled or attention.backend == "flex":
        _packed_hidden(forward, micro_batch)
    else:

        def note_mask(name: str, kwargs: dict[str, Any]) -> None:
            masks[name] = id(kwargs.get("mask"))
            kernels.layer = name

        with _layer_hooks(forward.model, pre=note_mask), kernels:
            _packed_hidden(forward, micro_batch)
    ran = attention.describe_layers()
    wanted = attention.backend if asked == "auto" else asked
    others = {name: backend for name, backend in ran.items() if backend != wanted}
    seen = {name: ", ".join(sorted(kernels.names.get(name, set()))) for name in ran}
    differing = [name for name in ran if seen[name] != next(iter(seen.values()))]
    passed = not others and not differing and len(set(masks.values())) <= 1
    note = ""
    if others:
        name, backend = next(iter(others.items()))
        note = f"{name} ran {backend} where {wanted} was wanted ({attention.reason})."
    elif len(set(masks.values())) > 1:
        note = "The layers were not all called with the one mask of the batch."
    elif differing:
        name, first = differing[0], next(iter(seen))
        note = f"{name} really ran {seen[name] or 'no kernel'}, {first} ran {seen[first]}."
    elif any(seen.values()):
        note = f"Kernels seen: {next(iter(seen.values()))}."
    good = f"{wanted} in {len(ran) - len(others.keys() | set(differing))}"
    return Line("backend of the layers", good, f"of {len(ran)}", passed, note)


@dataclass
class Pattern:
    """Which positions of one pack move when the token at a position is replaced.

    Attributes:
        probes: the replaced positions, in order.
        moved: bool ``[p, s]``.
        bounds: starts of the documents, and the end of the last one.
    """

    probes: list[int]
    moved: torch.Tensor
    bounds: list[int]


def measure_pattern(forward: PackedForward, batch: CheckBatch) -> Pattern:
    """Measures what the model attends to in the first row of a batch, one forward per probe.

    Probed are the first and the last position of up to eight documents, where a mask that is one
    off shows, and positions spread over the rest of the row.
    """
    whole = batch.micro_batch
    row = {key: value[:1] for key, value in whole.batch.items()}  # type: ignore[index]
    micro_batch = MicroBatch(row, whole.real_lengths[:1], 0)  # type: ignore[arg-type]
    documents = [document for document in batch.documents if document.row == 0]
    bounds = [document.start for document in documents] + [documents[-1].stop]
    ends = [(document.start, document.stop - 1) for document in documents]
    probes = {k for pair in ends[:_PROBED_DOCUMENTS] for k in pair}
    spread = torch.linspace(0, bounds[-1] - 1, max(2, _PROBES - len(probes))).long()
    chosen = sorted(probes | set(spread.tolist()))
    before = _packed_hidden(forward, micro_batch)
    noise = float(_shift(_packed_hidden(forward, micro_batch), before).max())
    moved = []
    for k in chosen:
        tokens = micro_batch.batch["tokens"].clone()
        tokens[0, k] = _replaced(forward.model, tokens[0, k])
        moved.append(_shift(_packed_hidden(forward, micro_batch, tokens), before)[0] > noise)
    return Pattern(chosen, torch.stack(moved), bounds)


def check_pattern(pattern: Pattern) -> Line:
    """A position is seen by itself and what follows in its document, and by nothing else."""
    leaks = blind = 0
    for k, moved in zip(pattern.probes, pattern.moved, strict=True):
        stop = next(bound for bound in pattern.bounds if bound > k)
        inside = moved[k:stop]
        leaks += bool(moved.sum() > inside.sum())
        # Far behind, low precision may round a small influence away; half of it cannot go missing.
        blind += int(inside.sum()) * 2 < len(inside)
    note = ""
    if leaks or blind:
        note = (
            f"{leaks} of the probed positions are seen from outside their document or from before, "
            f"{blind} are not seen by what follows them; the figure shows where."
        )
    found = f"{leaks + blind} of {len(pattern.probes)} wrong"
    return Line("attention pattern", found, "0", not note, note)
