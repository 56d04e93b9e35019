"""The figure of ``recipes/check_packing.py``: what the model attends to, over what it should."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

__all__ = ["draw_attention_pattern"]


def draw_attention_pattern(
    moved: np.ndarray,
    probes: Sequence[int],
    bounds: Sequence[int],
    path: Path,
    *,
    title: str,
) -> None:
    """Draws which positions of a pack moved when the token at one position was replaced.

    One stripe for every probe. Blue: the position moved and should; red: it moved and must not;
    orange: it did not move and should have. The triangles are the documents.

    Args:
        moved: bool ``[p, s]``, whether position q moved with probe p.
        probes: the replaced positions, in order, p of them.
        bounds: starts of the documents and the end of the last, so that document i is
            ``bounds[i] .. bounds[i + 1]``.
        path: the PNG to write.
        title: one line above the figure.
    """
    s = moved.shape[1]
    picture = np.ones((s, s, 3))
    starts = np.asarray(bounds)
    half = s // 200  # a stripe is drawn wide enough to be seen
    for row, k in zip(moved, probes, strict=True):
        after = int(np.searchsorted(starts, k, side="right"))
        begin = int(starts[after - 1]) if after else 0
        stop = int(starts[after]) if after < len(starts) else s
        q = np.arange(s)
        allowed = (q >= k) & (q < stop)
        columns = slice(max(begin, k - half), min(stop, k + half + 1))
        picture[row & allowed, columns] = (0.16, 0.42, 0.75)
        picture[row & ~allowed, columns] = (0.85, 0.15, 0.15)
        picture[~row & allowed, columns] = (0.95, 0.65, 0.15)
    figure = Figure(figsize=(6.4, 6.6), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(picture, interpolation="nearest", extent=(0, s, s, 0))
    for begin, stop in zip(bounds[:-1], bounds[1:], strict=True):
        axes.fill(
            [begin, begin, stop], [begin, stop, stop], fill=False, edgecolor="black", linewidth=0.9
        )
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("position whose token was replaced")
    axes.set_ylabel("position that moved (blue: as it should, red: leak, orange: blind)")
    figure.savefig(path, dpi=120)
