"""Figures: what is drawn is what is in the packs."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from tests.helpers import D
from torchtune_packing import PackedDataset
from torchtune_packing.plots import (
    plot_attention_pattern,
    plot_batch,
    plot_fill,
    plot_lengths,
    plot_mask,
    plot_padded_against_packed,
    save_figures,
)


def bars(axes: object) -> list[tuple[float, float, tuple[float, ...]]]:
    """Start and width of every bar, with its colour, from top to bottom."""
    found = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        colours = collection.get_facecolor()
        for i, path in enumerate(collection.get_paths()):
            x = path.vertices[:, 0]
            found.append((x.min(), x.max() - x.min(), tuple(colours[i % len(colours)])))
    return found


def packs(lens: list[int], max_seq_len: int) -> PackedDataset:
    return PackedDataset(D(lens), max_seq_len=max_seq_len, strategy="sequential")


def test_a_batch_is_drawn_to_scale_with_a_colour_per_document_and_grey_padding() -> None:
    axes = plot_batch(packs([3, 2, 6, 4], 6)).axes[0]  # [3 2 .] [6] [4 . .]
    found = bars(axes)
    assert [bar[:2] for bar in found] == [(0, 3), (3, 2), (5, 1), (0, 6), (0, 4), (4, 2)]
    documents = [colour for i, (*_, colour) in enumerate(found) if i not in (2, 5)]
    assert len(set(documents)) == 4
    assert found[2][2] == found[5][2] and found[2][2] not in documents
    assert "4 documents in 3 packs" in axes.get_title(loc="left")
    assert "83.3 % real" in axes.get_title(loc="left")  # 15 of 18


def test_the_mask_is_a_triangle_per_document() -> None:
    axes = plot_mask([2, 3], 6).axes[0]
    image = np.asarray(axes.images[0].get_array())
    drawn = (image != 1).any(axis=2)
    expected = np.zeros((6, 6), dtype=bool)
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        for query in range(begin, end):
            expected[query, begin : query + 1] = True
    assert np.array_equal(drawn, expected)
    # 3 + 6 + 1 pairs of 21
    assert "2 documents sees only itself:\n48 %" in axes.get_title(loc="left")


def test_a_long_mask_is_thinned_out() -> None:
    image = plot_mask([20_000, 12_768], 32_768).axes[0].images[0].get_array()
    assert max(image.shape) < 1100


PADDING = to_rgba("#d5dae0")
BLUE, ORANGE, RED, NOTHING = "#2f6db3", "#e07b39", "#c62828", (0, 0, 0, 0)


def test_a_pattern_tells_what_moved_rightly_wrongly_and_not_at_all() -> None:
    """Documents 0-3 and 4-7, probes at 0 and 5: position 6 leaks, position 7 is blind."""
    moved = np.array([[1, 1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0]], dtype=bool)
    axes = plot_attention_pattern(moved, [0, 5], [0, 4, 8]).axes[0]
    image = np.asarray(axes.images[0].get_array())
    first = [BLUE, BLUE, BLUE, BLUE, NOTHING, NOTHING, RED, NOTHING]
    second = [NOTHING] * 5 + [BLUE, BLUE, ORANGE]
    for column, colours in ((0, first), (5, second)):
        assert [tuple(point) for point in image[:, column]] == [to_rgba(c) for c in colours]
    assert axes.get_title(loc="left").startswith("Red:")
    # The stripes lie over the triangles, and the legend names the colours that are there.
    assert len(axes.patches) == 2
    assert all(triangle.zorder < axes.images[0].zorder for triangle in axes.patches)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[0] == "a document" and len(names) == 4
    moved[0, 6], moved[1, 7] = False, True
    axes = plot_attention_pattern(moved, [0, 5], [0, 4, 8]).axes[0]
    title = axes.get_title(loc="left")
    assert title.startswith("Every probed token is seen in its own document")
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["a document", "moved, as it should"]


def test_a_long_pattern_is_thinned_out_and_still_shows_a_single_leak() -> None:
    moved = np.zeros((1, 9000), dtype=bool)
    moved[0, 10:4000] = moved[0, 7003] = True
    image = plot_attention_pattern(moved, [10], [0, 4000, 9000]).axes[0].images[0].get_array()
    assert max(image.shape) <= 1001
    assert (np.asarray(image) == to_rgba(RED)).all(axis=2).any()


def test_padded_rows_are_as_long_as_the_longest_of_their_batch() -> None:
    figure = plot_padded_against_packed(packs([6, 1, 4, 2], 6), padded_batch_size=2)
    upper, lower = figure.axes
    widths: dict[int, float] = {}
    rows = [c.get_paths() for c in upper.collections]
    for row in rows:
        for path in row:
            y = int(path.vertices[:, 1].min())
            widths[y] = max(widths.get(y, 0), path.vertices[:, 0].max())
    assert widths[0] == widths[1] and widths[2] == widths[3]
    assert max(widths.values()) == 6
    positions = sum(widths.values())
    assert f"{positions:,.0f} positions, {100 * 13 / positions:.2f} %" in upper.get_title(
        loc="left"
    )
    # The documents have the same colours in both halves.
    upper_colours, lower_colours = (
        sorted((width, colour) for _, width, colour in bars(axes) if colour != PADDING)
        for axes in figure.axes
    )
    assert upper_colours == lower_colours and len(upper_colours) == 4
    # [6] [1 4] [2]: 13 of 18
    assert "18 positions, 72.22 %" in lower.get_title(loc="left")


def test_fill_shows_the_strategy_beside_data_order() -> None:
    ds = PackedDataset(D([5, 6, 2, 3]), max_seq_len=8)
    labels = [t.get_text() for t in plot_fill(ds).axes[0].get_legend().get_texts()]
    assert labels == ["best_fit: 2 packs, 100.00 % full", "sequential: 3 packs, 66.67 % full"]
    assert len(plot_fill(packs([5, 6], 8)).axes[0].get_legend().get_texts()) == 1


@pytest.mark.parametrize("lens", [[5], [1, 1, 1], [3, 900, 7]])
def test_lengths_of_any_spread_can_be_drawn(lens: list[int]) -> None:
    axes = plot_lengths(lens, 1000).axes[0]
    assert f"the longest {max(lens):,}" in axes.get_title(loc="left")


def test_all_figures_become_png_files(tmp_path: Path) -> None:
    files = save_figures(packs([3, 2, 6, 4], 6), tmp_path / "new" / "folder")
    assert [file.stem for file in files] == [
        "lengths",
        "fill",
        "batch",
        "mask",
        "padded_against_packed",
    ]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)
