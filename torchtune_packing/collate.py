"""Batches from packs (``collate_packed``) or from plain samples (``collate_flattened``).

Both give the same keys. A batch of two packs, ``[3, 2]`` and ``[4]``, padded to 6 positions:

    seq_lens   3     2   1        4       2        the padding tail is one last document
    tokens     a a a b b .        c c c c . .
    labels     - a a - b -        - c c c - -      first label of each document is ignored
    input_pos  0 1 2 0 1 0        0 1 2 3 0 1
    shifted    a a - b - -        c c c - - -      shift_labels=True: what t must predict

With ``mask=None`` they run anywhere, loader workers included, and return plain CPU tensors with
``seq_lens``; the mask is then made in the main process, once per batch. Any other ``mask`` builds
it here and drops ``seq_lens``: the batch that a stock torchtune recipe passes to its model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from torchtune_packing.masks import block_causal_block_mask, block_causal_mask, document_starts
from torchtune_packing.types import IGNORE_INDEX, PackedBatch

__all__ = ["collate_flattened", "collate_packed"]

# FlexAttention's kernels need Turing or newer; torchtune's own switch is the same.
_FLEX_CAPABILITY = (7, 5)


def collate_packed(
    batch: Sequence[Mapping[str, Any]],
    padding_idx: int = 0,
    ignore_idx: int = IGNORE_INDEX,
    *,
    pad_to: int | None = None,
    pad_to_multiple_of: int = 1,
    shift_labels: bool = False,
    mask: str | None = "auto",
    device: torch.device | str | None = None,
    pad_documents_to: int | None = None,
) -> PackedBatch:
    """Pads packs to one length and stacks them, one pack per row.

    A stock torchtune recipe calls it with ``padding_idx`` and ``ignore_idx`` only and passes what
    is left of the batch to its model, so ``mask="auto"`` gives it the mask that it can use.

    Args:
        batch: packs: ``tokens`` and ``labels`` ``[n]``, unshifted, and ``seq_lens`` ``[d]`` that
            sum to n; tensors, arrays or lists. Other keys are ignored.
        padding_idx: token that fills the rows up.
        ignore_idx: label of what is not trained; stored labels of -100 become this.
        pad_to: positions per row; None takes the longest pack of this batch. A fixed number (the
            data set's ``max_seq_len``) keeps shapes static.
        pad_to_multiple_of: round the positions per row up to a multiple of this.
        shift_labels: True gives aligned targets: ``labels[t]`` is what position t must predict.
        mask: "bool" for a tensor ``[b, s, s]``, "flex" for a BlockMask, "auto" for a BlockMask on
            a CUDA device that supports it and a bool mask elsewhere, None for no mask but
            ``seq_lens``.
        device: where the mask is built. None takes the CUDA device if this process holds tensors
            on one (a recipe whose model is there), else the CPU; a loader worker takes the CPU. All
            other tensors stay on the CPU.
        pad_documents_to: columns of ``seq_lens``, zero-filled; None takes the fewest that do. A
            fixed number (the plan's ``max_documents + 1``) keeps shapes static for compiled code.

    Returns:
        ``tokens``, ``labels``, ``input_pos``, int64 ``[b, s]``, and either ``seq_lens``, int32
        ``[b, d]``, zero-filled on the right with rows that sum to s, or ``mask``. ``input_pos``
        restarts at 0 in every document and stays below ``pad_to`` (or the longest pack), however
        far ``pad_to_multiple_of`` rounds up.

    Raises:
        ValueError: if the batch is empty, an item is no pack, its lengths disagree, ``pad_to`` or
            ``pad_documents_to`` is too small, an option has no such value, or the bool mask would
            exceed the limit of ``block_causal_mask``.
        RuntimeError: if a loader worker is asked for a CUDA mask or a BlockMask.
    """
    if len(batch) == 0:
        raise ValueError("The batch is empty; a batch holds at least one pack.")
    rows = [_read_pack(pack, index) for index, pack in enumerate(batch)]
    longest = max(tokens.numel() for tokens, _, _ in rows)
    if pad_to is not None and pad_to < longest:
        raise ValueError(
            f"pad_to is {pad_to}, but a pack of this batch holds {longest} tokens; use at least "
            "the max_seq_len of the data set."
        )
    return _collate_rows(
        rows,
        width=longest if pad_to is None else pad_to,
        padding_idx=padding_idx,
        ignore_idx=ignore_idx,
        pad_to_multiple_of=pad_to_multiple_of,
        shift_labels=shift_labels,
        mask=mask,
        device=device,
        pad_documents_to=pad_documents_to,
    )


def collate_flattened(
    batch: Sequence[Mapping[str, Any]],
    padding_idx: int = 0,
    ignore_idx: int = IGNORE_INDEX,
    *,
    pad_to_multiple_of: int = 1,
    shift_labels: bool = False,
    mask: str | None = "auto",
    device: torch.device | str | None = None,
    pad_documents_to: int | None = None,
) -> PackedBatch:
    """Lays the samples of a mini-batch end to end in one row: batches without padding.

    Args:
        batch: samples with ``tokens`` and ``labels`` ``[n]``, unshifted; tensors, arrays or lists.
            Empty samples are left out. An item with ``seq_lens`` (a pack) keeps its documents.
        padding_idx: token that fills the row up to a multiple.
        ignore_idx: label of what is not trained; stored labels of -100 become this.
        pad_to_multiple_of: round the positions of the row up to a multiple of this. The largest
            number of tokens that a batch may hold keeps shapes static.
        shift_labels: as in ``collate_packed``.
        mask: as in ``collate_packed``.
        device: as in ``collate_packed``.
        pad_documents_to: as in ``collate_packed``.

    Returns:
        The keys of ``collate_packed`` with one row: ``tokens``, ``labels``, ``input_pos``,
        int64 ``[1, total]``, and ``seq_lens``, int32 ``[1, d]``, or ``mask``. The first label of
        every sample is ignored. Positions of padding stay below the longest sample.

    Raises:
        ValueError: if no sample of the batch holds a token, a sample's lengths disagree, or as in
            ``collate_packed``.
        RuntimeError: if a loader worker is asked for a CUDA mask or a BlockMask.
    """
    rows = [_read_sample(sample, index) for index, sample in enumerate(batch)]
    rows = [row for row in rows if row[0].numel()]
    if not rows:
        raise ValueError(
            f"None of the {len(batch)} samples of the batch holds a token; leave empty samples out "
            "of the data."
        )
    tokens, labels, seq_lens = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return _collate_rows(
        [(tokens, labels, seq_lens)],
        width=tokens.numel(),
        max_position=int(seq_lens.max()),
        padding_idx=padding_idx,
        ignore_idx=ignore_idx,
        pad_to_multiple_of=pad_to_multiple_of,
        shift_labels=shift_labels,
        mask=mask,
        device=device,
        pad_documents_to=pad_documents_to,
    )


_Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _collate_rows(
    rows: Sequence[_Row],
    *,
    width: int,
    padding_idx: int,
    ignore_idx: int,
    pad_to_multiple_of: int,
    shift_labels: bool,
    mask: str | None,
    device: torch.device | str | None,
    pad_documents_to: int | None,
    max_position: int | None = None,
) -> PackedBatch:
    """Pads and stacks rows of ``tokens``, ``labels``, ``seq_lens``; builds the mask if asked to."""
    kind = _choose_mask(mask, device)
    if pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}, but must be at least 1.")
    s = -(-width // pad_to_multiple_of) * pad_to_multiple_of
    b = len(rows)
    # A row that is not full has one document more than its pack: the padding tail.
    d = max(lens.numel() + (tokens.numel() < s) for tokens, _, lens in rows)
    if pad_documents_to is not None:
        if pad_documents_to < d:
            raise ValueError(
                f"pad_documents_to is {pad_documents_to}, but a row of this batch holds {d} "
                "documents, its padding tail included; use the plan's max_documents + 1."
            )
        d = pad_documents_to

    tokens = torch.full((b, s), padding_idx, dtype=torch.int64)
    labels = torch.full((b, s), IGNORE_INDEX, dtype=torch.int64)
    seq_lens = torch.zeros((b, d), dtype=torch.int32)
    for row, (row_tokens, row_labels, row_lens) in enumerate(rows):
        n, documents = row_tokens.numel(), row_lens.numel()
        tokens[row, :n] = row_tokens
        labels[row, :n] = row_labels
        seq_lens[row, :documents] = row_lens
        if n < s:
            seq_lens[row, documents] = s - n

    input_pos = torch.arange(s) - document_starts(seq_lens, s)
    # The first token of a document could only be predicted from the document before it.
    labels.masked_fill_(input_pos == 0, IGNORE_INDEX)
    if shift_labels:
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if ignore_idx != IGNORE_INDEX:
        labels.masked_fill_(labels == IGNORE_INDEX, ignore_idx)
    # Only a padding tail can be longer than any document; its positions must not leave the model's
    # table of positions either.
    input_pos.clamp_(max=(width if max_position is None else max_position) - 1)

    result: PackedBatch = {"tokens": tokens, "labels": labels, "input_pos": input_pos}
    if kind is None:
        result["seq_lens"] = seq_lens
    else:
        where, name = kind
        build = block_causal_block_mask if name == "flex" else block_causal_mask
        result["mask"] = build(seq_lens.to(where), s)
    return result


def _choose_mask(
    mask: str | None, device: torch.device | str | None
) -> tuple[torch.device, str] | None:
    """Settles where the mask is built and which one, or None when the caller wants none."""
    if mask not in ("auto", "bool", "flex", None):
        raise ValueError(f'mask is {mask!r}, but must be "auto", "bool", "flex" or None.')
    if mask is None:
        if device is not None:
            raise ValueError(
                f"mask=None returns CPU tensors only, but device is {device}; leave device out and "
                "move the batch in the main process."
            )
        return None
    where = _training_device() if device is None else torch.device(device)
    if get_worker_info() is not None and (where.type != "cpu" or mask == "flex"):
        raise RuntimeError(
            f"A loader worker was asked for mask={mask!r} on {where}, but a worker may neither "
            "touch CUDA nor send a BlockMask. Use mask=None in the collate function and build the "
            "mask in the main process, or num_workers=0."
        )
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f'device is {where}, but there is no CUDA device; use device="cpu" or leave it out.'
        )
    if mask == "auto":
        mask = "flex" if where.type == "cuda" and _supports_flex(where) else "bool"
    return where, mask


def _training_device() -> torch.device:
    """The CUDA device on which this process already holds tensors, else the CPU.

    ``torch.cuda.is_available()`` would send the mask of a CPU run to an idle GPU. A recipe has
    moved its model before it asks for the first batch, so memory in use tells where it trains.
    """
    if (
        get_worker_info() is None
        and torch.cuda.is_initialized()
        and torch.cuda.memory_allocated() > 0
    ):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _supports_flex(device: torch.device) -> bool:
    """True if FlexAttention has a kernel for this CUDA device."""
    return torch.cuda.get_device_capability(device) >= _FLEX_CAPABILITY


def _read_pack(pack: Mapping[str, Any], index: int) -> _Row:
    """The three tensors of one pack, checked."""
    if not isinstance(pack, Mapping) or "seq_lens" not in pack:
        raise ValueError(
            f"Item {index} of the batch is no pack: it has {_keys_of(pack)} but no seq_lens. Wrap "
            "the data set in PackedDataset (in a config: "
            "torchtune_packing.datasets.packed_dataset), or use collate_flattened for samples that "
            "are not packed."
        )
    tokens, labels, seq_lens = _read_sample(pack, index)
    if tokens.numel() == 0:
        raise ValueError(f"Item {index} of the batch is an empty pack; leave it out of the data.")
    return tokens, labels, seq_lens


def _read_sample(sample: Mapping[str, Any], index: int) -> _Row:
    """The tokens and labels of one sample, with its length or the lengths of its documents."""
    if not isinstance(sample, Mapping) or "tokens" not in sample or "labels" not in sample:
        raise ValueError(
            f"Item {index} of the batch needs the keys tokens and labels, but has "
            f"{_keys_of(sample)}."
        )
    tokens, labels = _as_int64(sample["tokens"]), _as_int64(sample["labels"])
    if tokens.ndim != 1 or tokens.shape != labels.shape:
        raise ValueError(
            f"Item {index} of the batch has tokens of shape {list(tokens.shape)} and labels of "
            f"shape {list(labels.shape)}; both must be [n], one label per token."
        )
    if "seq_lens" not in sample:
        return tokens, labels, torch.tensor([tokens.numel()])
    seq_lens = _as_int64(sample["seq_lens"])
    if seq_lens.ndim != 1 or int(seq_lens.sum()) != tokens.numel() or bool((seq_lens < 1).any()):
        raise ValueError(
            f"Item {index} of the batch has seq_lens {seq_lens.tolist()} for {tokens.numel()} "
            "tokens; they must be positive and sum to the number of tokens."
        )
    return tokens, labels, seq_lens


def _as_int64(values: Any) -> torch.Tensor:
    """Tensor, array or list as an int64 CPU tensor, without a copy where there is nothing to do."""
    if isinstance(values, torch.Tensor):
        return values.to(device="cpu", dtype=torch.int64)
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _keys_of(item: object) -> str:
    """What an item of the batch holds, for an error message."""
    return f"the keys {sorted(map(str, item))}" if isinstance(item, Mapping) else f"{type(item)}"
