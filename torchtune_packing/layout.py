"""Where the documents of a batch lie: one object per batch, shared by all layers.

The variable-length kernels do not read a mask. They read where each document starts and ends. With
rows laid end to end, ``b`` rows of ``s`` positions are one line of ``b * s`` tokens, and because
the lengths of a row sum to ``s`` no document crosses a row:

    seq_lens    [[3, 2, 1], [4, 2, 0]]         b = 2, s = 6, d = 3
    cu_seqlens  [0, 3, 5, 6, 10, 12, 12]       b * d + 1 entries, ends repeated for the empty slot
    spans       [[0, 3, 5, 6, 10, 12],         first token of each document
                 [3, 2, 1, 4, 2, 0]]           its length

Everything is computed on the CPU, where the loader's ``seq_lens`` lie, and one asynchronous copy
brings ``cu_seqlens`` to the device: nothing waits for the device, and every tensor has a size that
depends on ``b`` and the number of slots alone, so compiled code sees the same shapes each step.
"""

from __future__ import annotations

import torch

__all__ = ["DocumentLayout"]


class DocumentLayout:
    """Documents of a packed batch ``[b, s]``, as the variable-length attention kernels want them.

    An ordinary object and not a pytree node on purpose: what maps a function over a module's
    arguments (FSDP2's casting to a lower precision, for one) sees one leaf and leaves it alone.

    Attributes:
        seq_lens: int32 ``[b, d]`` on the CPU, zero-filled on the right, rows sum to s.
        cu_seqlens: int32 ``[b * d + 1]`` on the batch's device: ends of the documents over all
            rows laid end to end; empty slots repeat the end before them.
        spans: int32 ``[2, b * d]`` on the CPU: first token and length of each document over all
            rows laid end to end. Length 0 for an empty slot and for what is known to be padding.
        batch_size: b.
        seq_len: s.
        max_seqlen: an upper bound on the length of a document. Compiled code may depend on it, so
            it is meant to stay the same from batch to batch.
    """

    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor
    spans: torch.Tensor
    batch_size: int
    seq_len: int
    max_seqlen: int

    def __init__(
        self,
        seq_lens: torch.Tensor,
        cu_seqlens: torch.Tensor,
        spans: torch.Tensor,
        *,
        seq_len: int,
        max_seqlen: int,
    ) -> None:
        self.seq_lens = seq_lens
        self.cu_seqlens = cu_seqlens
        self.spans = spans
        self.batch_size = seq_lens.shape[0]
        self.seq_len = seq_len
        self.max_seqlen = max_seqlen

    @classmethod
    def from_seq_lens(
        cls,
        seq_lens: torch.Tensor,
        s: int,
        *,
        device: torch.device | str = "cpu",
        real_lengths: torch.Tensor | None = None,
        num_slots: int | None = None,
        max_seqlen: int | None = None,
    ) -> DocumentLayout:
        """Builds the layout of a batch from the lengths of its documents.

        Args:
            seq_lens: int ``[b, d]`` on the CPU, zero-filled on the right; the padding tail of a
                row counts as its last document, so that each row sums to s.
            s: positions in a row.
            device: where ``cu_seqlens`` is wanted.
            real_lengths: int ``[b]``, real tokens per row. Documents that start at or behind it
                are padding: their spans get length 0, and kernels that honour that leave them out.
            num_slots: slots for documents per row, at least d. A fixed number keeps the shapes
                the same from batch to batch.
            max_seqlen: upper bound on the length of a document, padding tail included; None for s.
                Kernels start work for that many positions of every slot, so a bound close to the
                longest document saves them idle blocks.

        Returns:
            The layout.

        Raises:
            ValueError: When ``seq_lens`` is not what the arguments say.
        """
        if seq_lens.dim() != 2 or seq_lens.is_floating_point():
            raise ValueError(
                f"seq_lens must be an integer tensor [b, d]; found {seq_lens.dtype} "
                f"{list(seq_lens.shape)}"
            )
        if seq_lens.device.type != "cpu":
            raise ValueError(
                f"seq_lens are on {seq_lens.device}, and reading them back would wait for the "
                "device; pass the CPU tensor that the collate function returned"
            )
        b, d = seq_lens.shape
        lengths = seq_lens.to(torch.int32)
        sums = lengths.sum(dim=1, dtype=torch.int64)
        if bool((lengths < 0).any()) or bool((sums != s).any()):
            raise ValueError(
                f"the lengths in a row of seq_lens must be >= 0 and sum to s = {s}; found sums "
                f"{sums.tolist()}; count the padding tail as the last document"
            )
        slots = d if num_slots is None else num_slots
        if slots < d:
            raise ValueError(f"num_slots = {slots} is less than the {d} slots that seq_lens has")
        if max_seqlen is None:
            max_seqlen = s
        elif max_seqlen < int(lengths.max()):
            raise ValueError(
                f"max_seqlen = {max_seqlen} is less than the longest document, {int(lengths.max())}"
            )
        if slots > d:
            lengths = torch.nn.functional.pad(lengths, (0, slots - d))
        flat = lengths.flatten()
        cu = torch.zeros(flat.numel() + 1, dtype=torch.int32)
        torch.cumsum(flat, dim=0, dtype=torch.int32, out=cu[1:])
        spans = torch.stack([cu[:-1], flat])
        if real_lengths is not None:
            first_pad = torch.arange(b) * s + real_lengths.to("cpu", torch.int64)
            is_padding = cu[:-1].view(b, slots) >= first_pad[:, None]
            spans[1].masked_fill_(is_padding.flatten(), 0)
        device = torch.device(device)
        if device.type == "cuda":
            cu = cu.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            cu = cu.to(device)
        return cls(lengths, cu, spans, seq_len=s, max_seqlen=max_seqlen)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the documents that are not empty and not known to be padding, in order."""
        return [n for n in self.spans[1].tolist() if n]

    def __repr__(self) -> str:
        """Shows the size of the batch and how many documents it holds."""
        return (
            f"DocumentLayout(b={self.batch_size}, s={self.seq_len}, "
            f"documents={len(self.lengths)}, device={self.cu_seqlens.device})"
        )
