"""Block-causal masks and what goes with them, as pure functions of the document lengths.

Every function takes ``seq_lens``, an int tensor ``[b, d]`` with the document lengths of each row,
zero-filled on the right, and answers on its device. Only the shapes of the result depend on Python
numbers, so nothing waits for the device, nothing loops over documents, and all of them (except
``cu_seqlens``) trace under ``torch.compile(fullgraph=True)``.

Everything follows from one row of numbers: ``start[t]``, where the document that holds position t
begins. Position q may attend to position k when ``start[q] <= k <= q``:

    seq_lens  3     2   3           k  0 1 2 3 4 5 6 7
    position  0 1 2 3 4 5 6 7     q 0  x . . . . . . .
    id        0 0 0 1 1 2 2 2       1  x x . . . . . .
    start     0 0 0 3 3 5 5 5       2  x x x . . . . .
                                    3  . . . x . . . .      ids and starts never decrease,
                                    4  . . . x x . . .      so each row sees one range of
                                    5  . . . . . x . .      columns, and each column is
                                    6  . . . . . x x .      seen by one range of rows
                                    7  . . . . . x x x

The same holds for blocks of B positions, so a FlexAttention ``BlockMask`` needs no search: a query
block i with first position a and last position e sees the blocks ``start[a] // B .. i``, and those
from ``ceil(start[e] / B)`` to ``i - 1`` in full. A key block j with first position f and last
position l is seen by the query blocks ``j .. (stop[l] - 1) // B``, and in full by those from
``j + 1`` to ``stop[f] // B - 1``, where ``stop`` is the end of a document. The library's
``create_block_mask`` finds the same blocks by evaluating all ``s * s`` pairs.

Rows should sum to s, as the batches of ``collate_packed`` do. Where they do not, the result is
still a mask that no softmax can turn into NaN: positions past the last document form one more
document, documents past position s are cut off, and a length of zero is no document, wherever it
stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "MAX_BOOL_MASK_BYTES",
    "MAX_INDEX_BYTES",
    "block_causal_block_mask",
    "block_causal_mask",
    "choose_block_size",
    "cu_seqlens",
    "document_ids",
    "document_starts",
]

#: Largest bool mask that ``block_causal_mask`` builds unless told otherwise: 2 GiB.
MAX_BOOL_MASK_BYTES = 2 * 1024**3

#: Largest index tensors of a BlockMask before its blocks are made larger: 128 MiB.
MAX_INDEX_BYTES = 128 * 1024**2


def document_ids(seq_lens: torch.Tensor, s: int) -> torch.Tensor:
    """Tells for every position which document of its row it belongs to.

    Args:
        seq_lens: int ``[b, d]``, document lengths, zero-filled on the right.
        s: positions per row.

    Returns:
        int32 ``[b, s]``: the column of ``seq_lens``, or d past the last document.

    Raises:
        ValueError: if ``seq_lens`` is not an int tensor ``[b, d]`` or s is not positive.

    For instance:

        document_ids(torch.tensor([[3, 2, 0]]), 6)  ->  [[0, 0, 0, 1, 1, 3]]
    """
    _check(seq_lens, s)
    return _find_documents(_document_ends(seq_lens), _positions(s, seq_lens.device))


def document_starts(seq_lens: torch.Tensor, s: int) -> torch.Tensor:
    """Tells for every position where its document starts; ``arange(s) - starts`` are its positions.

    Args:
        seq_lens: int ``[b, d]``, document lengths, zero-filled on the right.
        s: positions per row.

    Returns:
        int32 ``[b, s]``, never decreasing along a row, ``starts[:, t] <= t``.

    Raises:
        ValueError: if ``seq_lens`` is not an int tensor ``[b, d]`` or s is not positive.

    For instance:

        document_starts(torch.tensor([[3, 2, 0]]), 6)  ->  [[0, 0, 0, 3, 3, 5]]
    """
    _check(seq_lens, s)
    ends = _document_ends(seq_lens)
    return _starts_of(ends, _find_documents(ends, _positions(s, seq_lens.device)))


def block_causal_mask(
    seq_lens: torch.Tensor, s: int, *, max_bytes: int | None = MAX_BOOL_MASK_BYTES
) -> torch.Tensor:
    """Builds the dense mask for ``scaled_dot_product_attention``: same document and causal.

    Args:
        seq_lens: int ``[b, d]``, document lengths, zero-filled on the right.
        s: positions per row.
        max_bytes: refuse a mask of more bytes (it takes ``b * s * s``); None sets no limit.

    Returns:
        bool ``[b, s, s]``, True = may attend. Every position sees at least itself.

    Raises:
        ValueError: if the mask would be larger than ``max_bytes``, ``seq_lens`` is not an int
            tensor ``[b, d]``, or s is not positive.

    For instance:

        block_causal_mask(torch.tensor([[2, 1]]), 3)  ->  [[[1, 0, 0],
                                                            [1, 1, 0],
                                                            [0, 0, 1]]]
    """
    _check(seq_lens, s)
    size = seq_lens.shape[0] * s * s
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"A bool mask for {seq_lens.shape[0]} rows of {s:,} positions takes {size:,} bytes, "
            f"more than the limit of {max_bytes:,}. Use a backend that needs no such mask (flex, "
            "varlen, flash_attn), fewer rows or shorter packs, or raise max_bytes."
        )
    starts = document_starts(seq_lens, s)
    seen = starts.unsqueeze(-1) <= _positions(s, seq_lens.device)
    return seen.tril_()


def choose_block_size(
    b: int, s: int, *, block_size: int = 128, max_index_bytes: int | None = MAX_INDEX_BYTES
) -> int:
    """Doubles a block size until the index tensors of a BlockMask fit into a number of bytes.

    A BlockMask lists, for each of the ``n = ceil(s / block_size)`` blocks of a row, the blocks that
    it sees or is seen by, in four int32 tensors with n columns (the compiled kernels refuse fewer):
    ``16 * b * n * n`` bytes. With one row and 128 MiB, blocks of 128 serve up to 370,000 positions,
    and 1,048,576 positions get blocks of 512.

    Args:
        b: rows of the batch.
        s: positions per row.
        block_size: the smallest size, in positions.
        max_index_bytes: the limit; None keeps ``block_size``.

    Returns:
        ``block_size`` times a power of two.

    Raises:
        ValueError: if ``block_size`` is below 2.
    """
    if block_size < 2:
        raise ValueError(f"block_size is {block_size}, but a block holds at least 2 positions.")
    if max_index_bytes is not None:
        while block_size < s and 16 * b * (-(-s // block_size)) ** 2 > max_index_bytes:
            block_size *= 2
    return block_size


def block_causal_block_mask(
    seq_lens: torch.Tensor,
    s: int,
    *,
    block_size: int = 128,
    max_index_bytes: int | None = MAX_INDEX_BYTES,
    window: int | None = None,
) -> BlockMask:
    """Computes the BlockMask of the block-causal mask from the document lengths.

    It equals ``create_block_mask`` on the same mask: block counts, indices up to those counts, and
    ``to_dense()``, on the KV side (forward) and the Q side (backward). Cost: ``O(b * s * log d)``
    time for the document starts and ``16 * b * (s / block_size) ** 2`` bytes of indices.

    Args:
        seq_lens: int ``[b, d]``, document lengths, zero-filled on the right.
        s: positions per row, a multiple of the block size or not.
        block_size: positions per block, for queries and keys alike. It is doubled until the indices
            fit into ``max_index_bytes``; see ``choose_block_size``.
        max_index_bytes: how many bytes of indices to spend; None keeps ``block_size`` at any cost.
        window: positions that a sliding window lets a query see, itself included; None for all.

    Returns:
        A BlockMask with batch size b and one head (shared by all heads), on the device of
        ``seq_lens``. Its ``mask_mod`` reads the document start of the query and nothing else.

    Raises:
        ValueError: if ``seq_lens`` is not an int tensor ``[b, d]``, s is not positive,
            ``block_size`` is below 2, or ``window`` is below 1.
    """
    # Imported here: everything else in this package works on a torch without FlexAttention.
    from torch.nn.attention.flex_attention import BlockMask

    _check(seq_lens, s)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, but a position sees at least itself.")
    b = seq_lens.shape[0]
    size = choose_block_size(b, s, block_size=block_size, max_index_bytes=max_index_bytes)
    device = seq_lens.device
    n = -(-s // size)
    block = torch.arange(n, dtype=torch.int32, device=device)
    first = block * size
    # The last one may lie past s, where every document ends at s.
    last = first + (size - 1)

    ends = _document_ends(seq_lens)
    positions = _positions(n * size, device)
    documents = _find_documents(ends, positions)
    starts = _starts_of(ends, documents)
    # Of the first and the last position of every block: where its document starts and stops.
    start_first, start_last = starts[:, ::size], starts[:, size - 1 :: size]
    stop_first = _stops_of(ends, documents[:, ::size], s)
    stop_last = _stops_of(ends, documents[:, size - 1 :: size], s)
    if window is not None:
        # A window moves both ends of the ranges and leaves them in order, so nothing else changes.
        starts = torch.maximum(starts, positions - window + 1)
        start_first, start_last = starts[:, ::size], starts[:, size - 1 :: size]
        stop_first = torch.minimum(stop_first, first + window)
        stop_last = torch.minimum(stop_last, last + window)

    # Key blocks seen by query block i: partial from lowest to full_from - 1, full from there to
    # i - 1, and partial again on the diagonal. An incomplete last block counts as partly masked.
    lowest = start_first // size
    full_from = torch.minimum((start_last + size - 1) // size, block)
    full_from = torch.where(first + size <= s, full_from, block)
    kv_num_blocks = full_from - lowest + 1
    kv_indices = _consecutive(lowest, block)
    diagonal = (kv_num_blocks - 1).unsqueeze(-1).long()
    kv_indices.scatter_(-1, diagonal, block.view(1, n, 1).expand(b, n, 1))
    full_kv_num_blocks = block - full_from
    full_kv_indices = _consecutive(full_from, block)

    # Query blocks that see key block j: the diagonal (partial), then full up to partial_from - 1,
    # then partial up to the block in which the document of j's last position ends.
    highest = (stop_last - 1) // size
    partial_from = torch.maximum(stop_first // size, block + 1)
    q_num_blocks = highest - partial_from + 2
    q_indices = _consecutive(partial_from - 1, block)
    q_indices[..., 0] = block
    full_q_num_blocks = partial_from - block - 1
    full_q_indices = _consecutive((block + 1).expand(b, n), block)

    def block_causal(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return (starts[b, q_idx] <= kv_idx) & (kv_idx <= q_idx)

    return BlockMask(
        seq_lengths=(s, s),
        kv_num_blocks=kv_num_blocks.unsqueeze(1),
        kv_indices=kv_indices.unsqueeze(1),
        full_kv_num_blocks=full_kv_num_blocks.unsqueeze(1),
        full_kv_indices=full_kv_indices.unsqueeze(1),
        q_num_blocks=q_num_blocks.unsqueeze(1),
        q_indices=q_indices.unsqueeze(1),
        full_q_num_blocks=full_q_num_blocks.unsqueeze(1),
        full_q_indices=full_q_indices.unsqueeze(1),
        BLOCK_SIZE=(size, size),
        mask_mod=block_causal,
    )


def cu_seqlens(seq_lens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Gives the document boundaries that variable-length attention kernels take.

    The rows are laid end to end and lengths of zero are left out. How many documents there are is
    read from the data, so call this on CPU lengths; on a device it waits for the device.

    Args:
        seq_lens: int ``[b, d]``, document lengths, zero-filled on the right.

    Returns:
        ``cu_seqlens``, int32 ``[documents + 1]`` from 0 to the number of positions, and
        ``max_seqlen``, the longest document.

    Raises:
        ValueError: if ``seq_lens`` is not an int tensor ``[b, d]`` or holds no document.

    For instance:

        cu_seqlens(torch.tensor([[3, 2, 0], [1, 1, 3]]))  ->  [0, 3, 5, 6, 7, 10], 3
    """
    _check(seq_lens, 1)
    lengths = seq_lens[seq_lens > 0]
    if lengths.numel() == 0:
        raise ValueError(
            f"seq_lens of shape {list(seq_lens.shape)} holds no document: every length is zero."
        )
    boundaries = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=seq_lens.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=boundaries[1:])
    return boundaries, int(lengths.max())


def _check(seq_lens: torch.Tensor, s: int) -> None:
    """Refuses what can be known to be wrong without reading the tensor."""
    if not isinstance(seq_lens, torch.Tensor):
        raise ValueError(
            f"seq_lens is a {type(seq_lens).__name__}, but must be an int tensor [b, d]; zero-fill "
            "shorter rows on the right."
        )
    if seq_lens.ndim != 2 or seq_lens.is_floating_point() or seq_lens.dtype == torch.bool:
        raise ValueError(
            f"seq_lens is {seq_lens.dtype} {list(seq_lens.shape)}; it must be an int tensor [b, d]."
        )
    if s < 1:
        raise ValueError(f"s is {s}, but a row has at least one position.")


def _consecutive(lowest: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """For each row the block numbers from ``lowest`` on, int32 ``[b, n, n]``.

    Rows have as many columns as there are blocks, since the compiled kernels refuse fewer. What
    lies beyond the count of a row is not attended to, and is a valid block all the same.
    """
    return (lowest.unsqueeze(-1) + block).clamp_(max=block.numel() - 1)


def _positions(s: int, device: torch.device) -> torch.Tensor:
    """0 to s - 1, int32 ``[s]``."""
    return torch.arange(s, dtype=torch.int32, device=device)


def _document_ends(seq_lens: torch.Tensor) -> torch.Tensor:
    """The position after each document, int32 ``[b, d]``."""
    return torch.cumsum(seq_lens, dim=1, dtype=torch.int32)


def _find_documents(ends: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The document that holds each position ``[p]``, int32 ``[b, p]``; d past the last one.

    A document of length zero ends where it starts, so no position finds it.
    """
    wanted = positions.expand(ends.shape[0], -1).contiguous()
    return torch.searchsorted(ends, wanted, right=True, out_int32=True)


def _starts_of(ends: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Where each of these documents starts, int32, the shape of ``documents``."""
    starts = torch.cat([ends.new_zeros(ends.shape[0], 1), ends], dim=1)
    return starts.gather(1, documents.long())


def _stops_of(ends: torch.Tensor, documents: torch.Tensor, s: int) -> torch.Tensor:
    """The position after each of these documents, at most s."""
    stops = torch.cat([ends, ends.new_full((ends.shape[0], 1), s)], dim=1)
    return stops.gather(1, documents.long()).clamp_(max=s)
