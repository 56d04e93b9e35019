"""Attention backends for packed batches: chosen once, installed into a torchtune model.

===========  =====================  ====================  =========================================
backend      runs on                mask for the layers   how documents are kept apart
===========  =====================  ====================  =========================================
sdpa         anything               bool ``[b, s, s]``    torch's SDPA (or the layer's own code)
                                                          under a dense mask
varlen       CPU; CUDA with         ``DocumentLayout``    CPU: one fused causal call per document;
             torch >= 2.10                                CUDA: ``torch.nn.attention.varlen``
flash_attn   CUDA, with the         ``DocumentLayout``    ``flash_attn_varlen_func``
             flash-attn package
flex         CUDA; CPU forward      ``BlockMask``         FlexAttention, blocks by arithmetic
===========  =====================  ====================  =========================================

Use in a recipe:

    attn = install_attention(model, "auto", device=device, dtype=dtype)
    log.info(attn.reason)
    ...
    mask = attn.prepare(batch.pop("seq_lens"), tokens.shape[1])      # once per batch
    logits = model(tokens, input_pos=input_pos, mask=mask)           # all layers share it

Nothing is decided at import or per layer, and never by what the machine has instead of where the
model runs. What cannot be honoured is refused here, before the first step.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

import torchtune_packing.needs_torchtune  # noqa: F401

# isort: split
from torchtune_packing.attention_choice import (
    BACKENDS,
    attention_layers,
    check_backend,
    kernels,
    obstacle,
    trial_failure,
)
from torchtune_packing.attention_kernels import (
    WindowedBlockMasks,
    allowed_pairs,
    dense_attention,
)
from torchtune_packing.attention_layers import Kernel, pack_layer
from torchtune_packing.layout import DocumentLayout
from torchtune_packing.masks import block_causal_block_mask, block_causal_mask

__all__ = ["BACKENDS", "InstalledAttention", "install_attention"]

_log = logging.getLogger(__name__)

#: What "auto" tries, the fastest first.
_PREFERENCE = {"cuda": ("flash_attn", "varlen", "flex", "sdpa")}
_PREFERENCE_ELSEWHERE = ("varlen", "sdpa")

_SWITCH = "set attention_backend=sdpa to leave the kernel out from the start"


class InstalledAttention:
    """The backend that a model was prepared for, and the maker of its masks.

    Attributes:
        backend: the backend that runs: "sdpa", "flex", "varlen" or "flash_attn".
        reason: one line for the log: which backend, and why.
        device: where the masks are made.
    """

    def __init__(self, layers: dict[str, nn.Module], device: torch.device) -> None:
        self.backend = ""
        self.reason = ""
        self.device = device
        self._layers: dict[str, Any] = dict(layers)
        self._num_slots = 32
        self._max_seqlen = 512

    def prepare(
        self, seq_lens: torch.Tensor, s: int, *, real_lengths: torch.Tensor | None = None
    ) -> torch.Tensor | BlockMask | WindowedBlockMasks | DocumentLayout:
        """Makes a batch's mask, once for all layers, without waiting for the device.

        Args:
            seq_lens: int32 ``[b, d]`` as the collate function returned it, on the CPU.
            s: positions in a row.
            real_lengths: int ``[b]``, real tokens per row, when known: ``varlen`` on the CPU then
                spends nothing on the padding tail and outputs zeros there.

        Returns:
            What the model takes as ``mask=``: a bool tensor ``[b, s, s]``, a BlockMask (one per
            sliding window for a model that has them), or a DocumentLayout.

        Raises:
            ValueError: When the lengths are not those of a batch of s positions, or a dense mask
                would be too large.
        """
        if self.backend in ("varlen", "flash_attn"):
            # Both grow in powers of two and never shrink, so compiled code meets few of them.
            while self._num_slots < seq_lens.shape[1]:
                self._num_slots *= 2
            longest = int(seq_lens.max()) if seq_lens.device.type == "cpu" else s
            while self._max_seqlen < longest:
                self._max_seqlen *= 2
            return DocumentLayout.from_seq_lens(
                seq_lens,
                s,
                device=self.device,
                real_lengths=real_lengths,
                num_slots=self._num_slots,
                max_seqlen=self._max_seqlen,
            )
        if self.device.type == "cuda" and seq_lens.device.type == "cpu":
            seq_lens = seq_lens.pin_memory()
        seq_lens = seq_lens.to(self.device, non_blocking=True)
        if self.backend == "sdpa":
            return block_causal_mask(seq_lens, s)
        windows = {getattr(x, "sliding_window_size", None) for x in self._layers.values()}
        if windows == {None}:
            return block_causal_block_mask(seq_lens, s)
        return WindowedBlockMasks(
            {window: block_causal_block_mask(seq_lens, s, window=window) for window in windows}
        )

    def describe_layers(self) -> dict[str, str]:
        """Which backend each attention layer ran in its last forward, or will run in its first.

        Returns:
            Name of the layer -> backend.
        """
        return {name: x.packed_ran or x.packed_backend for name, x in self._layers.items()}

    def __repr__(self) -> str:
        """Shows the choice."""
        return f"InstalledAttention({self.reason!r})"

    def _install(self, backend: str, kernel: Kernel | None) -> None:
        self.backend = backend
        mask_types: tuple[type, ...] = ()
        if backend == "flex":
            mask_types = (BlockMask, WindowedBlockMasks)
        elif backend != "sdpa":
            mask_types = (DocumentLayout,)
        guarded = None if kernel is None else _FirstCall(kernel, backend, self)
        for layer in self._layers.values():
            pack_layer(layer, backend, guarded, mask_types)


class _FirstCall:
    """A kernel whose first call in the real model may still fail, in which case sdpa takes over.

    The trial at set-up has run it on a small batch; what is left is what only the real size shows.
    Ranks cannot agree on anything in the middle of a forward, so there the failure is an error.
    Compiled layers are traced without this guard.
    """

    def __init__(self, kernel: Kernel, backend: str, installed: InstalledAttention) -> None:
        self.kernel = kernel
        self.backend = backend
        self.installed = installed
        self.worked = False

    def __call__(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        if torch.compiler.is_compiling() or self.worked:
            return self.kernel(layer, q, k, v, mask)
        try:
            if self.installed.backend == self.backend:
                out = self.kernel(layer, q, k, v, mask)
                self.worked = True
                return out
        except torch.OutOfMemoryError:
            raise  # sdpa would need more
        except Exception as error:
            what = f"attention backend {self.backend} failed at its first call with head_dim "
            what += f"{layer.head_dim} and s = {q.shape[1]} ({type(error).__name__}: {error})"
            if _world_size() > 1:
                raise RuntimeError(f"{what}; {_SWITCH}") from error
            _log.warning("%s; sdpa takes over; %s", what, _SWITCH)
            self.installed.backend = "sdpa"
            self.installed.reason = f"attention backend sdpa: {what}"
        layer.packed_ran = "sdpa"
        return dense_attention(layer, q, k, v, allowed_pairs(mask, layer, q.device))


def _world_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def _all_ranks_agree(fine: bool, device: torch.device) -> bool:
    """True when it is fine on every rank; every rank must ask."""
    if _world_size() == 1:
        return fine
    answer = torch.tensor(int(fine), device=device)
    torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN)
    return bool(answer.item())


def install_attention(
    model: nn.Module,
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    forward_only: bool = False,
) -> InstalledAttention:
    """Prepares a torchtune model for packed batches and chooses how its attention runs.

    Every attention layer of the model changes its class (see
    ``torchtune_packing.attention_layers``); weights and names stay. From then on a call without
    a mask is an error, never plain causal attention across documents. A bool mask is always
    honoured, so that evaluation and generation go on working.

    Each kernel is tried once on a small batch, and replaced by the next one with one warning when
    it fails. In a distributed job all ranks must call this function, and all get the same backend.

    Args:
        model: a torchtune ``TransformerDecoder``, before or after activation checkpointing,
            compiling or sharding was applied.
        backend: one of ``BACKENDS``. "auto" takes the fastest that is exact for this model.
        device: where the model runs.
        dtype: what the model computes in.
        forward_only: whether no gradients will be asked for, so that kernels without a backward
            may serve.

    Returns:
        The backend, the reason for it, and ``prepare`` for each batch's mask.

    Raises:
        ValueError: When the backend is unknown, or the model or one of its layers cannot keep
            documents apart under it.
    """
    device = torch.device(device)
    layers = attention_layers(model)
    check_backend(backend, layers, device=device, dtype=dtype, forward_only=forward_only)
    installed = InstalledAttention(layers, device)
    candidates: tuple[str, ...] = (backend, "sdpa")
    if backend == "auto":
        candidates = _PREFERENCE.get(device.type, _PREFERENCE_ELSEWHERE)
    passed_over: list[str] = []
    failures: list[str] = []
    for candidate in candidates:
        why_not = obstacle(candidate, layers, device=device, dtype=dtype, forward_only=forward_only)
        if candidate != "sdpa" and not _all_ranks_agree(why_not is None, device):
            passed_over.append(f"not {candidate}: {why_not or 'another rank cannot run it'}")
            continue
        kernel, tried = _first_that_works(installed, candidate, dtype, forward_only)
        failures += tried
        if kernel is not None or candidate == "sdpa":
            installed._install(candidate, kernel)
            break
    asked = "chosen by auto" if backend == "auto" else f"attention_backend={backend}"
    reason = f"attention backend {installed.backend} on {device} in {dtype} ({asked})"
    installed.reason = "; ".join([reason, *passed_over, *failures])
    if failures:
        _log.warning("%s; %s", installed.reason, _SWITCH)
    return installed


def _first_that_works(
    installed: InstalledAttention, backend: str, dtype: torch.dtype, forward_only: bool
) -> tuple[Kernel | None, list[str]]:
    """The first kernel of a backend that passes its trial on all ranks, and what failed before."""
    installed.backend = backend
    failures: list[str] = []
    for kernel in kernels(backend, installed.device):
        failure = trial_failure(
            kernel,
            installed._layers,
            installed.prepare,
            device=installed.device,
            dtype=dtype,
            forward_only=forward_only,
        )
        if _all_ranks_agree(failure is None, installed.device):
            return kernel, failures
        failures.append(f"{backend} was tried and {failure or 'it failed on another rank'}")
    return None, failures
