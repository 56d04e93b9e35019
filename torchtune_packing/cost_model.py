"""How long an epoch will take, from a few seconds of measuring one layer.

The time of a decoder on packed documents is, to a good approximation, linear in four counts:

    seconds = a * calls  +  b * positions  +  c * pairs  +  e * documents

``positions`` is the work of the linear layers, padding included; ``pairs`` that of attention,
``sum(len**2)`` where documents are attended to one by one and ``s**2`` a row under a dense mask.
The constants are fitted, none below zero, to forward and backward passes of one layer of the
model's width, on its device, with the attention backend that a run would choose. How good they are
is told by other rows, which the fit has not seen.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchtune_packing.plan import PackPlan

__all__ = ["CostModel", "LayerShape", "Work", "layer_shape", "measure", "pack_work", "padded_work"]


#: Shorter rows would time the overhead only.
_SHORTEST = 128


@dataclass(frozen=True)
class Work:
    """What a stretch of training asks of each layer.

    Attributes:
        calls: forward and backward passes.
        positions: rows times row length, padding included.
        pairs: sum of squared document lengths.
        dense_pairs: sum of squared row lengths, which a dense mask costs.
        documents: documents.
    """

    calls: float
    positions: float
    pairs: float
    dense_pairs: float
    documents: float


@dataclass(frozen=True)
class LayerShape:
    """The widths of a decoder that its time depends on."""

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_dim: int
    trains_weights: bool


#: Positions, documents, seconds measured, seconds predicted.
_Point = tuple[int, int, float, float]


@dataclass(frozen=True)
class CostModel:
    """Fitted constants, in seconds for the whole model.

    Attributes:
        per_call: cost of a pass, whatever it holds.
        per_position: cost of a position in the linear layers.
        per_pair: cost of a pair of positions in attention.
        per_document: cost of a document.
        backend: the attention backend that was measured.
        points: what it was fitted to: positions, documents, seconds, and what the model says.
        unseen: the same of rows that were measured only to try it.
    """

    per_call: float
    per_position: float
    per_pair: float
    per_document: float
    backend: str
    points: tuple[_Point, ...] = ()
    unseen: tuple[_Point, ...] = ()

    def seconds(self, work: Work) -> float:
        """Predicted seconds."""
        pairs = work.dense_pairs if self.backend == "sdpa" else work.pairs
        return (
            self.per_call * work.calls
            + self.per_position * work.positions
            + self.per_pair * pairs
            + self.per_document * work.documents
        )

    @property
    def error(self) -> float:
        """Largest relative error on the rows that it was not fitted to, or else on those it was."""
        tried = self.unseen or self.points
        return max((abs(said / found - 1) for *_, found, said in tried), default=0.0)

    def try_on(self, layouts: Sequence[Sequence[int]], seconds: npt.ArrayLike) -> CostModel:
        """The same model, with its predictions for rows that it was not fitted to.

        Args:
            layouts: lengths of the documents in each row.
            seconds: measured time of each row, for the whole model.
        """
        return replace(self, unseen=_points(self, layouts, seconds))

    def as_dict(self) -> dict[str, Any]:
        """Constants, points and error, ready for JSON."""
        return {**asdict(self), "error": self.error}


def layer_shape(model: nn.Module) -> LayerShape:
    """Reads the widths off a torchtune decoder, which may be on the meta device."""
    layer: Any = model.layers[0]  # type: ignore[index]
    widths = (getattr(m, "out_features", getattr(m, "out_dim", 0)) for m in layer.mlp.modules())
    return LayerShape(
        num_layers=len(model.layers),  # type: ignore[arg-type]
        embed_dim=layer.attn.embed_dim,
        num_heads=layer.attn.num_heads,
        num_kv_heads=layer.attn.num_kv_heads,
        head_dim=layer.attn.head_dim,
        intermediate_dim=max([*widths, layer.attn.embed_dim]),
        trains_weights=not any(".lora_" in name for name, _ in model.named_parameters()),
    )


def _one_layer(shape: LayerShape, positions: int) -> Any:
    from torchtune import modules

    dim, kv_dim = shape.embed_dim, shape.num_kv_heads * shape.head_dim
    hidden = shape.intermediate_dim
    attention = modules.MultiHeadAttention(
        embed_dim=dim,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        q_proj=nn.Linear(dim, shape.num_heads * shape.head_dim, bias=False),
        k_proj=nn.Linear(dim, kv_dim, bias=False),
        v_proj=nn.Linear(dim, kv_dim, bias=False),
        output_proj=nn.Linear(shape.num_heads * shape.head_dim, dim, bias=False),
        pos_embeddings=modules.RotaryPositionalEmbeddings(shape.head_dim, max_seq_len=positions),
        max_seq_len=positions,
    )
    mlp = modules.FeedForward(
        gate_proj=nn.Linear(dim, hidden, bias=False),
        down_proj=nn.Linear(hidden, dim, bias=False),
        up_proj=nn.Linear(dim, hidden, bias=False),
    )
    layer = modules.TransformerSelfAttentionLayer(
        attention, mlp, sa_norm=modules.RMSNorm(dim), mlp_norm=modules.RMSNorm(dim)
    )
    # A decoder around it, because attention is installed into decoders; its ends are never run.
    return modules.TransformerDecoder(
        tok_embeddings=nn.Embedding(1, dim),
        layers=[layer],
        max_seq_len=positions,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        norm=modules.RMSNorm(dim),
        output=nn.Linear(dim, 1, bias=False),
    )


def measure(
    shape: LayerShape,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: str = "auto",
    max_seq_len: int = 2048,
    budget_s: float = 4.0,
) -> CostModel:
    """Measures one layer on rows of few and of many documents, and fits the constants.

    Args:
        shape: widths of the model.
        device: where it trains.
        dtype: what it computes in.
        backend: attention backend, as in a config.
        max_seq_len: longest row worth measuring.
        budget_s: seconds to spend, about; rows get shorter on a slow device.
    """
    from torchtune_packing.attention import install_attention

    device = torch.device(device)
    with torch.device(device):
        decoder = _one_layer(shape, max(_SHORTEST, max_seq_len)).to(dtype)
    decoder.requires_grad_(shape.trains_weights)
    attention = install_attention(decoder, backend, device=device, dtype=dtype)
    layer = decoder.layers[0]

    def run(lengths: list[int]) -> float:
        s = sum(lengths)
        x = torch.randn(1, s, shape.embed_dim, device=device, dtype=dtype, requires_grad=True)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
        mask = attention.prepare(torch.tensor([lengths], dtype=torch.int32), s)
        _synchronize(device)
        start = time.perf_counter()
        layer(x, mask=mask, input_pos=positions).sum().backward()
        _synchronize(device)
        return time.perf_counter() - start

    longest = _affordable(run, max_seq_len, budget_s)
    layouts, unseen = _layouts(longest), _unseen_layouts(longest)
    for lengths in layouts + unseen:  # warms up, and compiles where a backend does
        run(lengths)
    rounds = [[run(lengths) for lengths in layouts + unseen] for _ in range(3)]
    # What a busy machine adds is never negative, so the fastest round is nearest to the truth.
    seconds = np.min(rounds, axis=0) * shape.num_layers
    model = fit(layouts, seconds[: len(layouts)], attention.backend)
    return model.try_on(unseen, seconds[len(layouts) :])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _affordable(run: Any, max_seq_len: int, budget_s: float) -> int:
    """The longest row, a power of two, whose layouts fit into the time."""
    longest = _SHORTEST
    while longest * 2 <= max_seq_len:
        run([longest])
        # Four passes over eight layouts of about three quarters of the row on average.
        if run([longest]) * 2 * 24 > budget_s:
            break
        longest *= 2
    return longest


def _layouts(longest: int) -> list[list[int]]:
    """Rows that tell the constants apart: long and short ones, of few and of many documents."""
    return [
        [longest],
        [longest // 4] * 4,
        [longest // 32] * 32,
        [longest // 2],
        [longest // 32] * 16,
        [longest // 4],
    ]


def _unseen_layouts(longest: int) -> list[list[int]]:
    """Rows between those, with documents as uneven as people's."""
    return [
        [longest // 2, longest // 4, longest // 8, longest // 16, longest // 16],
        [3 * longest // 16] * 4,
    ]


def fit(layouts: Sequence[Sequence[int]], seconds: npt.ArrayLike, backend: str) -> CostModel:
    """Least squares of relative errors with no constant below zero.

    There are four constants, so every choice of those that are not zero is tried.

    Args:
        layouts: lengths of the documents in each measured row.
        seconds: time of each row, for the whole model.
        backend: "sdpa" pays for every pair of a row, the others for those within documents.
    """
    found = np.asarray(seconds, dtype=np.float64)
    rows = []
    for lengths in layouts:
        s = sum(lengths)
        pairs = s * s if backend == "sdpa" else sum(n * n for n in lengths)
        rows.append([1, s, pairs, len(lengths)])
    features = np.array(rows, dtype=np.float64)
    scale = features.max(axis=0)
    relative = features / scale / found[:, None]
    best, constants = np.inf, np.zeros(4)
    for size in range(1, 5):
        for chosen in itertools.combinations(range(4), size):
            part = np.linalg.lstsq(relative[:, chosen], np.ones(len(found)), rcond=None)[0]
            residual = float(np.square(relative[:, chosen] @ part - 1).sum())
            if (part >= 0).all() and residual < best - 1e-12:
                best, constants = residual, np.zeros(4)
                constants[list(chosen)] = part
    per_call, per_position, per_pair, per_document = map(float, constants / scale)
    model = CostModel(per_call, per_position, per_pair, per_document, backend)
    return replace(model, points=_points(model, layouts, found))


def _points(
    model: CostModel, layouts: Sequence[Sequence[int]], seconds: npt.ArrayLike
) -> tuple[_Point, ...]:
    """What was measured beside what the model says, row by row."""
    points = []
    for lengths, found in zip(layouts, np.asarray(seconds), strict=True):
        s, pairs = sum(lengths), sum(n * n for n in lengths)
        said = model.seconds(Work(1, s, pairs, s * s, len(lengths)))
        points.append((s, len(lengths), float(found), float(said)))
    return tuple(points)


def pack_work(plan: PackPlan, *, batch_size: int = 1, static_shapes: bool = False) -> Work:
    """The work of an epoch of packs.

    Args:
        plan: the packs.
        batch_size: packs in a micro-batch, padded to the longest of them.
        static_shapes: every row is ``max_seq_len`` long, as compiled code has it.
    """
    widths = _batch_widths(plan.pack_lengths, batch_size)
    if static_shapes:
        widths = np.full_like(widths, plan.max_seq_len)
    return Work(
        calls=-(-len(plan) // batch_size),
        positions=int(widths.sum()),
        pairs=int(plan.attention_cost.sum()),
        dense_pairs=int(np.square(widths).sum()),
        documents=len(plan.documents),
    )


def padded_work(lengths: npt.ArrayLike, *, batch_size: int, seed: int = 0) -> Work:
    """The work of an epoch of padded batches of the same documents, in random order.

    Args:
        lengths: tokens of each document, ``[n]``.
        batch_size: documents in a batch, padded to the longest of them.
        seed: of the order.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(lengths))
    widths = _batch_widths(lengths[order], batch_size)
    pairs = int(np.square(widths).sum())
    return Work(
        calls=-(-len(lengths) // batch_size),
        positions=int(widths.sum()),
        pairs=pairs,
        dense_pairs=pairs,
        documents=len(lengths),
    )


def _batch_widths(lengths: npt.NDArray[np.int64], batch_size: int) -> npt.NDArray[np.int64]:
    """Width of each row once every batch is padded to its longest row."""
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths, starts)
    return np.repeat(longest, np.diff(np.append(starts, len(lengths))))
