"""The records that flow through the package, and the letters used for their shapes.

Data flows one way:

    samples -> TokenStore -> PackPlan -> PackedDataset -> collate (CPU)
        -> device batch -> model -> loss

Shape letters used in every docstring of the package:

===  ==========================================================
b    rows of a batch
s    positions in a row (pack length, padding included)
d    documents in a row (the padding tail counts as the last one)
T    tokens in a store
n    samples, or documents of a store
h    attention heads
===  ==========================================================
"""

from collections.abc import Sequence
from typing import TypedDict

import torch

__all__ = ["IGNORE_INDEX", "Pack", "PackedBatch", "Sample"]

#: The label that cross entropy skips, the same value as in torch and torchtune.
IGNORE_INDEX = -100


class Sample(TypedDict):
    """One tokenized sample as torchtune's data sets yield it.

    ``labels[t]`` belongs to ``tokens[t]`` (unshifted); ``IGNORE_INDEX`` marks what is not trained.
    """

    tokens: Sequence[int]
    labels: Sequence[int]


class Pack(TypedDict):
    """The real documents of one pack, end to end: no padding, no positions, no mask.

    ``tokens`` and ``labels`` are int64 ``[n]``; ``seq_lens`` is int64 ``[d]`` and sums to n. The
    first label of every document is ``IGNORE_INDEX``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    seq_lens: torch.Tensor


class PackedBatch(TypedDict, total=False):
    """A collated batch: ``tokens``, ``labels``, ``input_pos`` int64 ``[b, s]``.

    With ``seq_lens`` int32 ``[b, d]`` (zero-filled on the right, every row sums to s) when the mask
    is still to be made, or with ``mask`` when it has been.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    input_pos: torch.Tensor
    seq_lens: torch.Tensor
    mask: object
