"""Pictures of what packing did (lengths, fill, a batch, a mask) and of what a model attends to.

Every function returns a matplotlib ``Figure`` that belongs to no window, so they work on a server
and in a notebook alike. Grey is always padding; every other colour is a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from torchtune_packing.masks import document_ids
from torchtune_packing.plan import plan_packs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchtune_packing.dataset import PackedDataset

__all__ = [
    "plot_attention_pattern",
    "plot_batch",
    "plot_fill",
    "plot_lengths",
    "plot_mask",
    "plot_padded_against_packed",
    "save_figures",
]

_INK, _MUTED, _PADDING = "#1f2933", "#66727f", "#d5dae0"
_MAIN, _LIGHT, _SECOND = "#2f6db3", "#c3d6ec", "#e07b39"
_ALARM = "#c62828"
#: Colours of documents, in turn; neighbours differ in hue and in lightness.
_DOCUMENTS = (
    "#2f6db3",
    "#e9a23b",
    "#3a8f6b",
    "#d1615d",
    "#8064ad",
    "#67b7c4",
    "#a86b3c",
    "#93b84e",
)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)  # inches
    return Figure(figsize=(width, height), dpi=150, layout=layout, facecolor="white")


def _dress(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=_INK, pad=10)
    axes.set_xlabel(xlabel, fontsize=9.5, color=_MUTED)
    axes.set_ylabel(ylabel, fontsize=9.5, color=_MUTED)
    axes.tick_params(colors=_MUTED, labelsize=8.5, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b4bcc6")


def _thousands(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _ticks_of_lengths(axis: Any) -> None:
    """Labels 1, 2, 5, 10, ... on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    _thousands(axis)


def _ticks_of_positions(axis: Any, size: int) -> None:
    """Eighths of a pack, so that its end has a label; left alone where a pack has no eighths."""
    if size % 8 == 0:
        axis.set_ticks(range(0, size + 1, size // 8))
    _thousands(axis)


def plot_lengths(seq_lens: npt.ArrayLike, max_seq_len: int) -> Figure:
    """Histogram of document lengths beside the tokens that they hold, and where a pack ends.

    Args:
        seq_lens: tokens of each document, ``[n]``.
        max_seq_len: tokens that a pack can hold.
    """
    lengths = np.asarray(seq_lens)
    median = float(np.median(lengths))
    top = max(int(lengths.max()), max_seq_len)
    edges = np.unique(np.geomspace(max(1, lengths.min()), top + 1, 41).round())
    if len(edges) < 2:
        edges = np.array([lengths.min(), lengths.min() + 1])
    documents, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)
    figure = _figure(9, 3.9)
    axes = figure.subplots()
    both = ((documents, _MAIN, "documents"), (tokens, _SECOND, "tokens that are in them"))
    for counts, colour, name in both:
        share = 100 * counts / counts.sum()
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.25)
        axes.stairs(share, edges, color=colour, linewidth=1.6, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax)  # the marks' names stand above the bars
    marks = [(median, f"median {median:,.0f}", _MAIN), (max_seq_len, "end of a pack", _INK)]
    height = axes.get_ylim()[1]
    for x, text, colour in marks:
        axes.axvline(x, color=colour, linewidth=1, linestyle=(0, (4, 3)))
        # Inside the axes, and away from the line's other side where the bars are.
        axes.annotate(
            f"{text}: {x:,}" if text == "end of a pack" else text,
            (x, height),
            xytext=(-5, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8.5,
            color=colour,
        )
    title = (
        f"Half of the documents have at most {median:,.0f} tokens, the longest {lengths.max():,}"
    )
    _dress(axes, title, "tokens in a document (logarithmic)", "share of all, in %")
    _ticks_of_lengths(axes.xaxis)
    axes.legend(
        frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(0.8, 1), labelcolor=_INK
    )
    return figure


def plot_fill(dataset: PackedDataset) -> Figure:
    """Fill of every pack, fullest first, beside what data order would give.

    Args:
        dataset: the packs.
    """
    size = dataset.max_seq_len
    shown = [(dataset.strategy, dataset.plan, _MAIN)]
    if dataset.strategy != "sequential" and not dataset.split_across_pack:
        lengths = np.minimum(dataset.store.seq_lens, size)
        plan = plan_packs(lengths, max_seq_len=size, strategy="sequential")
        shown.append(("sequential", plan, _SECOND))
    figure = _figure(9, 3.6)
    axes = figure.subplots()
    widest = max(len(plan) for _, plan, _ in shown)
    axes.axhspan(0, 100, color=_PADDING, linewidth=0)
    for name, plan, colour in shown:
        fill = 100 * np.sort(plan.pack_lengths)[::-1] / size
        # Steps, so that a last pack that is nearly empty still shows.
        x, y = np.arange(len(fill) + 1), np.append(fill, 0)
        if plan is dataset.plan:
            axes.fill_between(x, y, step="post", color=_LIGHT, linewidth=0)
        label = f"{name}: {len(plan):,} packs, {100 * plan.fill:.2f} % full"
        axes.step(x, y, where="post", color=colour, linewidth=1.8, label=label)
    axes.set_xlim(0, widest * 1.01)
    axes.set_ylim(0, 103)
    axes.legend(fontsize=9, loc="lower left", labelcolor=_INK, framealpha=0.95)
    stats = dataset.stats
    title = f"On average {100 * stats.fill:.2f} % of a pack is real tokens; grey is padding"
    _dress(axes, title, f"packs of {size:,} tokens, fullest first", "fill in %")
    _thousands(axes.xaxis)
    return figure


def _rows(
    axes: Axes, rows: list[tuple[list[int], int]], gap: float, names: Sequence[int] | None = None
) -> None:
    """Draws rows of documents end to end, each followed by its padding.

    Args:
        axes: where to draw.
        rows: lengths of the documents, and the length of the row.
        gap: white space between two rows, as a share of a row.
        names: number of each document, which chooses its colour; None counts from 0.
    """
    num_documents = sum(len(lengths) for lengths, _ in rows)
    names = range(num_documents) if names is None else names
    palette = iter([_DOCUMENTS[name % len(_DOCUMENTS)] for name in names])
    for y, (lengths, width) in enumerate(rows):
        ends = np.cumsum(lengths)
        colours = [next(palette) for _ in lengths]
        spans = [(int(e - n), int(n)) for e, n in zip(ends, lengths, strict=True)]
        place = (y + gap / 2, 1 - gap)
        # A hair of white between documents, where they are wide enough for one.
        axes.broken_barh(spans, place, facecolors=colours, edgecolor="white", linewidth=0.5)
        if width > ends[-1]:
            axes.broken_barh([(int(ends[-1]), int(width - ends[-1]))], place, facecolors=_PADDING)
    axes.set_ylim(len(rows), 0)


def plot_batch(dataset: PackedDataset, num_packs: int = 8) -> Figure:
    """Some packs drawn to scale, one bar a pack, one colour a document.

    Args:
        dataset: the packs.
        num_packs: how many to draw.
    """
    plan = dataset.plan
    # Spread over the plan: its first packs hold the longest documents.
    chosen = np.unique(np.linspace(0, len(plan) - 1, min(num_packs, len(plan))).astype(int))
    rows = [(plan.seq_lens(int(i)).tolist(), dataset.max_seq_len) for i in chosen]
    documents = sum(len(lengths) for lengths, _ in rows)
    real = sum(sum(lengths) for lengths, _ in rows)
    figure = _figure(9, 1.4 + 0.32 * len(rows))
    axes = figure.subplots()
    _rows(axes, rows, 0.18)
    axes.set_xlim(0, dataset.max_seq_len)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [f"{i:,}" for i in chosen])
    share = 100 * real / (len(rows) * dataset.max_seq_len)
    title = (
        f"{documents} documents in {len(rows)} packs, a colour each; {share:.1f} % real tokens, "
        "grey is padding"
    )
    _dress(axes, title, "position in the pack", "number of the pack")
    _ticks_of_positions(axes.xaxis, dataset.max_seq_len)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def plot_mask(seq_lens: npt.ArrayLike, max_seq_len: int) -> Figure:
    """Which position attends to which in one pack: a triangle per document, nothing between them.

    Args:
        seq_lens: lengths of the documents, ``[d]``.
        max_seq_len: positions of the pack; what the documents leave is padding.
    """
    from matplotlib.colors import to_rgb

    lengths = [int(n) for n in np.asarray(seq_lens)]
    padding = max_seq_len - sum(lengths)
    slots = lengths + [padding] * bool(padding)
    ids = document_ids(torch.tensor([slots]), max_seq_len)[0].numpy()
    # At most about 1,000 points a side are drawn, so that a long pack does not take s * s memory.
    step = max(1, max_seq_len // 1000)
    ids = ids[::step]
    colours = [to_rgb(_DOCUMENTS[i % len(_DOCUMENTS)]) for i in range(len(lengths))]
    palette = np.array([*colours, to_rgb(_PADDING)])
    visible = (ids[:, None] == ids[None, :]) & np.tri(len(ids), dtype=bool)
    image = np.ones((len(ids), len(ids), 3))
    image[visible] = palette[np.broadcast_to(ids[:, None], visible.shape)[visible]]
    pairs = sum(n * (n + 1) // 2 for n in slots)
    share = 100 * pairs / (max_seq_len * (max_seq_len + 1) // 2)
    figure = _figure(5.6, 5.9)
    axes = figure.subplots()
    axes.imshow(image, extent=(0, max_seq_len, max_seq_len, 0), interpolation="nearest")
    axes.plot([0, max_seq_len], [0, max_seq_len], color="#b4bcc6", linewidth=0.8)
    title = (
        f"Each of the {len(lengths)} documents sees only itself:\n{share:.0f} % of the pairs of "
        "plain causal attention"
    )
    _dress(axes, title, "position that is attended to (key)", "position that attends (query)")
    for axis in (axes.xaxis, axes.yaxis):
        _ticks_of_positions(axis, max_seq_len)
    axes.set_xlim(0, max_seq_len)
    axes.set_ylim(max_seq_len, 0)
    return figure


def plot_attention_pattern(
    moved: npt.NDArray[np.bool_], probes: Sequence[int], bounds: Sequence[int]
) -> Figure:
    """What a model was seen to attend to in one pack, over what it should.

    A light triangle for each document, and over them one stripe for each probe: the positions that
    moved when its token was replaced. Blue moved and should, red moved and must not, orange did not
    move and should have.

    Args:
        moved: bool ``[p, s]``, whether position q moved with probe p.
        probes: the replaced positions, p of them, in order.
        bounds: starts of the documents and the end of the last one, so that document i lies from
            ``bounds[i]`` up to ``bounds[i + 1]``.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    s = moved.shape[1]
    step = max(1, s // 1000)  # positions of a point of the image
    half = max(step, s // 300)  # a stripe is drawn wide enough to be seen
    edges, positions = np.asarray(bounds), np.arange(s)
    image = np.zeros((-(-s // step), -(-s // step), 4))
    seen: dict[str, str] = {}  # colours that were drawn, with their meaning
    for row, k in zip(moved, probes, strict=True):
        after = int(np.searchsorted(edges, k, side="right"))
        begin = int(edges[after - 1]) if after else 0
        stop = int(edges[after]) if after < len(edges) else s
        allowed = (positions >= k) & (positions < stop)
        columns = slice(max(begin, k - half) // step, (min(stop, k + half + 1) - 1) // step + 1)
        # Where positions share a point, what is wrong is drawn over what is right.
        for which, colour, meaning in (
            (row & allowed, _MAIN, "moved, as it should"),
            (~row & allowed, _SECOND, "did not move, and should have"),
            (row & ~allowed, _ALARM, "moved, and must not"),
        ):
            image[np.flatnonzero(which) // step, columns] = to_rgba(colour)
            if which.any():
                seen[colour] = meaning
    as_it_should = not seen.keys() & {_SECOND, _ALARM}
    figure = _figure(5.6, 5.9)
    axes = figure.subplots()
    for begin, stop in zip(bounds[:-1], bounds[1:], strict=True):
        axes.fill([begin, begin, stop], [begin, stop, stop], color=_LIGHT, linewidth=0)
    # Images lie under everything else by default.
    axes.imshow(image, interpolation="nearest", extent=(0, s, s, 0), zorder=2)
    title = (
        "Every probed token is seen in its own document,\nfrom its position on, and nowhere else"
    )
    if not as_it_should:
        title = "Red: a position saw what it must not see;\norange: it did not see what it should"
    patches = [Patch(color=_LIGHT, label="a document")]
    patches += [Patch(color=colour, label=meaning) for colour, meaning in seen.items()]
    # The upper half is never drawn on, but by a leak backwards.
    axes.legend(handles=patches, loc="upper right", fontsize=8.5, frameon=False, labelcolor=_INK)
    _dress(axes, title, "position whose token was replaced", "position that moved")
    axes.set_xlim(0, s)
    axes.set_ylim(s, 0)
    _thousands(axes.xaxis)
    _thousands(axes.yaxis)
    return figure


def plot_padded_against_packed(
    dataset: PackedDataset, *, num_packs: int = 4, padded_batch_size: int = 8
) -> Figure:
    """The same documents as padded batches and as packs, drawn to the same scale.

    Args:
        dataset: the packs.
        num_packs: how many packs to draw.
        padded_batch_size: documents of a padded batch, each padded to the longest of them.
    """
    plan, size = dataset.plan, dataset.max_seq_len
    chosen = np.unique(np.linspace(0, len(plan) - 1, min(num_packs, len(plan))).astype(int))
    packs = [(plan.seq_lens(int(i)).tolist(), size) for i in chosen]
    lengths = np.array([n for row, _ in packs for n in row])
    # As a shuffled run would meet them; fixed, so that the picture is always the same.
    order = np.random.RandomState(0).permutation(len(lengths)).tolist()
    lengths = lengths[order].tolist()
    padded = []
    for begin in range(0, len(lengths), padded_batch_size):
        batch = lengths[begin : begin + padded_batch_size]
        padded += [([n], max(batch)) for n in batch]
    figure = _figure(9, 6.2)
    upper, lower = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [max(4, min(12, len(padded) / 8)), 2.2]}
    )
    for axes, rows, gap, names, name in (
        (upper, padded, 0.12, order, f"Padded, {padded_batch_size} documents in a batch"),
        (lower, packs, 0.2, None, "The same documents packed"),
    ):
        _rows(axes, rows, gap, names)
        positions = sum(width for _, width in rows)
        title = (
            f"{name}: {positions:,} positions, {100 * sum(lengths) / positions:.2f} % of them real"
            + "; grey is padding" * (axes is upper)
        )
        _dress(axes, title, "", "rows, a line between batches" if axes is upper else "packs")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    for batch in range(padded_batch_size, len(padded), padded_batch_size):
        upper.axhline(batch, color="#9aa5b1", linewidth=0.6)
    lower.set_xlabel("position in the row", fontsize=9.5, color=_MUTED)
    lower.set_xlim(0, size)
    _ticks_of_positions(lower.xaxis, size)
    return figure


def _typical_pack(dataset: PackedDataset) -> npt.NDArray[np.int64]:
    """A pack whose documents can be told apart: about six of them, as equal as they come."""
    plan = dataset.plan
    counts = np.diff(plan.pack_offsets)
    near = np.flatnonzero(np.abs(counts - 6) == np.abs(counts - 6).min())
    return plan.seq_lens(int(near[plan.attention_cost[near].argmin()]))


def save_figures(
    dataset: PackedDataset, folder: str | Path, *, padded_batch_size: int = 8
) -> list[Path]:
    """Draws everything and writes PNG files.

    Args:
        dataset: the packs.
        folder: made when it is missing; files of the same names are replaced.
        padded_batch_size: documents of a padded batch to compare with.

    Returns:
        The files: lengths, fill, batch, mask and padded_against_packed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "lengths": plot_lengths(dataset.store.seq_lens, dataset.max_seq_len),
        "fill": plot_fill(dataset),
        "batch": plot_batch(dataset),
        "mask": plot_mask(_typical_pack(dataset), dataset.max_seq_len),
        "padded_against_packed": plot_padded_against_packed(
            dataset, padded_batch_size=padded_batch_size
        ),
    }
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        # Without the version of matplotlib, the same figure is the same file.
        figure.savefig(files[-1], metadata={"Software": None})
    return files
