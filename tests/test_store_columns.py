"""Columns of tokens: Parquet, Arrow and Hugging Face data sets go in as they are, or not at all."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config

from torchtune_packing import PackedDataset
from torchtune_packing.datasets.source_key import source_key
from torchtune_packing.store import TokenStore
from torchtune_packing.store.columns import TokenColumns
from torchtune_packing.store.shards import build_in_shards

ROWS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]]
LABELS = [[-100, 2, 3], [], [4], [-100, -100, 7, 8, 9], [-100, -100]]


def table(rows: Any = ROWS, labels: Any = LABELS, kind: pa.DataType | None = None, **more: Any):
    """An Arrow table of tokens and labels."""
    kind = kind or pa.list_(pa.int64())
    columns = {"tokens": pa.array(rows, kind), "labels": pa.array(labels, kind)}
    return pa.table(columns | {name: pa.array(values) for name, values in more.items()})


def write(path: Path, content: pa.Table, **options: Any) -> str:
    """Writes a table as its suffix says: Parquet, Arrow file, or Arrow stream."""
    if path.suffix == ".parquet":
        pq.write_table(content, path, **options)
    else:
        new = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
        with new(path, content.schema) as writer:
            writer.write_table(content)
    return str(path)


def check(store: TokenStore) -> None:
    """The store of ROWS and LABELS."""
    assert store.tokens.tolist() == [token for row in ROWS for token in row]
    assert store.labels.tolist() == [label for row in LABELS for label in row]
    assert store.seq_lens.tolist() == [3, 1, 5, 2]
    assert store.trained.tolist() == [2, 0, 3, 0]
    assert store.empty.tolist() == [1]


KINDS = {
    "int8": pa.list_(pa.int8()),
    "int32": pa.list_(pa.int32()),
    "int64": pa.list_(pa.int64()),
    "large": pa.large_list(pa.int32()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_files_of_every_integer_type_go_in(tmp_path: Path, suffix: str, kind: str) -> None:
    path = write(tmp_path / f"rows{suffix}", table(kind=KINDS[kind], other=list("abcde")))
    check(TokenStore.from_samples(TokenColumns(path)))
    check(TokenStore.build(tmp_path / "store", TokenColumns(path), num_workers=2))


def test_several_files_and_row_groups_are_read_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 100, size).tolist() for size in rng.integers(0, 9, 700)]
    write(tmp_path / "b.parquet", table(rows[500:], rows[500:]), row_group_size=70)
    write(tmp_path / "a.parquet", table(rows[:500], rows[:500]), row_group_size=333)
    columns = TokenColumns(str(tmp_path / "*.parquet"))
    assert len(columns) == 700
    expected = TokenStore.from_samples([{"tokens": row, "labels": row} for row in rows])
    store = TokenStore.from_samples(columns)
    assert store.tokens.tolist() == expected.tokens.tolist()
    assert store.seq_lens.tolist() == expected.seq_lens.tolist()
    assert store.empty.tolist() == expected.empty.tolist()
    # Any range of rows, across files, row groups and batches.
    for begin, end in ((0, 1), (499, 501), (332, 690), (120, 135), (699, 700), (5, 5)):
        got = [chunk.tokens for chunk in columns.chunks(begin=begin, end=end)]
        found = np.concatenate(got).tolist() if got else []
        assert found == [token for row in rows[begin:end] for token in row]
        lengths = [n for c in columns.chunks(begin=begin, end=end) for n in c.seq_lens.tolist()]
        assert lengths == [len(row) for row in rows[begin:end]]
    assert columns[501]["tokens"].tolist() == rows[501]
    given = TokenColumns([tmp_path / "b.parquet", tmp_path / "a.parquet"])
    assert given[0]["tokens"].tolist() == rows[500]
    with pytest.raises(IndexError):
        columns[700]


def test_a_hugging_face_data_set_goes_in_with_its_selection(tmp_path: Path) -> None:
    import datasets

    ds = datasets.Dataset(table())
    check(TokenStore.from_samples(ds))
    renamed = ds.rename_column("tokens", "input_ids").with_format("torch")
    check(TokenStore.from_samples(renamed))
    chosen = TokenStore.from_samples(ds.select([3, 0]))
    assert chosen.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2, 3]
    assert len(PackedDataset(ds, max_seq_len=8)) == 2


def test_a_hugging_face_data_set_names_its_own_key(tmp_path: Path) -> None:
    import datasets

    ds = datasets.Dataset(table())
    stored = PackedDataset(ds, max_seq_len=8, cache_dir=tmp_path)
    assert stored.store.path == tmp_path / ds._fingerprint
    other = PackedDataset(ds.select([0, 3]), max_seq_len=8, cache_dir=tmp_path)
    assert other.store.path != stored.store.path and len(other.store) == 2


def test_a_hugging_face_transform_is_not_passed_over() -> None:
    import datasets

    def shout(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "tokens": [[t + 1 for t in row] for row in batch["tokens"]],
            "labels": batch["tokens"],
        }

    ds = datasets.Dataset(table([[1, 2]], [[1, 2]])).with_transform(shout)
    store = TokenStore.from_samples(ds)
    assert store.tokens.tolist() == [2, 3] and store.labels.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mask", {}, [1, -100, -100]),
        ("completion_mask", {}, [-100, 2, 3]),
        ("loss_mask", {}, [-100, 2, 3]),
        ("assistant_masks", {}, [-100, 2, 3]),
        ("answer", {"mask_column": "answer", "mask_means": "trained"}, [-100, 2, 3]),
        ("prompt", {"mask_column": "prompt", "mask_means": "ignored"}, [1, -100, -100]),
        ("x", {"label_column": "input_ids"}, [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("values", [[False, True, True], [0, 1, 1]])
def test_masks_become_labels(
    tmp_path: Path, name: str, options: dict[str, str], expected: list[int], values: list[Any]
) -> None:
    content = pa.table({"input_ids": pa.array([[1, 2, 3]]), name: pa.array([values])})
    columns = TokenColumns(write(tmp_path / "m.parquet", content), **options)
    assert TokenStore.from_samples(columns).labels.tolist() == expected


def test_shifted_labels_of_columns_become_unshifted(tmp_path: Path) -> None:
    path = write(tmp_path / "s.parquet", table([[1, 2, 3], [4, 5]], [[2, 3, -100], [5, -100]]))
    store = TokenStore.from_samples(TokenColumns(path), labels_are_shifted=True)
    assert store.labels.tolist() == [-100, 2, 3, -100, 5]


FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (table([[1], None], [[1], [2]]), "sample 1 .*has null in column 'tokens'"),
        (table([[1], [2]], [[1], None]), "sample 1 .*has null in column 'labels'"),
        (table([[1], [2, -3]], [[1], [2, 3]]), r"sample 1 \(.*\) has -3 among its tokens"),
        (table([[1], [], [2, 3]], [[1], [], [2, -1]]), r"sample 2 \(.*\) has -1 among its labels"),
        (
            table([[1], [2, None]], [[1], [2, 3]]),
            "sample 1 .*has null among the values of .*'tokens'",
        ),
        (
            table([[], [1], [2, 3]], [[], [1], [None, 3]]),
            "sample 2 .*null among the values of .*'labels'",
        ),
        (table([[1.0]], [[1.0]], FLOATS), "column 'tokens' of .* has lists of float"),
        (
            table([[1, 2], [3, 4]], [[1, 2], [3]]),
            "sample 1 .*has 2 values in tokens but 1 in labels",
        ),
        (
            table([[1], [2**31]], [[1], [2]]),
            "sample 1 .*has 2147483648 in column 'tokens', outside",
        ),
        (table([[1], [2]], [[1], [-(2**40)]]), "sample 1 .*has -1099511627776 in column 'labels'"),
        (
            pa.table({"tokens": [1, 2], "labels": [[1], [2]]}),
            "column 'tokens' .* has the type int64",
        ),
        (pa.table({"tokens": ["a"], "labels": [[1]]}), "column 'tokens' .* has the type string"),
        (pa.table({"tokens": [["a"]], "labels": [[1]]}), "has lists of string"),
        (pa.table({"tokens": [[True]], "labels": [[1]]}), "has lists of bool"),
        (pa.table({"tokens": [[1]], "labels": [[1.5]]}), "column 'labels' .* has lists of double"),
        (pa.table({"tokens": [[1]], "mask": [[2]]}), "sample 0 .*has 2 in the mask 'mask'"),
        (pa.table({"tokens": [[1]], "mask": [[0.5]]}), "the mask 'mask' .* has lists of double"),
        (pa.table({"tokens": [[1]]}), "has neither labels nor a mask"),
        (
            pa.table({"text": ["a"], "labels": [[1]]}),
            r"none of the columns \['tokens', 'input_ids'\]",
        ),
        (
            pa.table({"tokens": [[1]], "mask": [[1]], "loss_mask": [[1]]}),
            "more than one of the columns .*name the right one as mask_column",
        ),
    ],
)
def test_bad_columns_are_refused_by_name_and_row(
    tmp_path: Path, content: pa.Table, message: str
) -> None:
    path = write(tmp_path / "bad.parquet", content)
    with pytest.raises(ValueError, match=message) as caught:
        TokenStore.from_samples(TokenColumns(path))
    assert "bad.parquet" in str(caught.value)
    import datasets

    # Without a token column a data set is taken for one of samples, and refused as such.
    words = message if "tokens" in content.column_names else "sample 0 has no 'tokens'"
    with pytest.raises(ValueError, match=words):
        TokenStore.from_samples(datasets.Dataset(content))


def test_the_row_of_a_bad_value_counts_all_files_and_batches(tmp_path: Path) -> None:
    rows = [[1, 2]] * 300
    labels = [[1, 2]] * 299 + [[1]]
    paths = [write(tmp_path / f"{n}.parquet", table(rows, [[1, 2]] * 300)) for n in "ab"]
    paths.append(write(tmp_path / "c.parquet", table(rows, labels)))
    with pytest.raises(ValueError, match=r"sample 899 \(.*c.parquet\) has 2 values"):
        TokenStore.from_samples(TokenColumns(paths))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_column": "ids"}, r"rows.parquet has no column 'ids', only \['tokens', 'labels'\]"),
        ({"label_column": "targets"}, "has no column 'targets'"),
        ({"mask_column": "answer"}, "mask_column is 'answer': say with mask_means"),
        ({"mask_column": "m", "mask_means": "yes"}, "mask_means is 'yes'; it must be"),
        ({"mask_column": "m", "label_column": "labels"}, "both say what is trained"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    path = write(tmp_path / "rows.parquet", table())
    with pytest.raises(ValueError, match=message):
        TokenColumns(path, **options)


def test_rows_of_one_length_and_unsigned_tokens_go_in(tmp_path: Path) -> None:
    rows = [[i, i + 1, i + 2] for i in range(300)]
    columns = {"input_ids": pa.array(rows, pa.list_(pa.uint64(), 3))}
    content = pa.table(columns | {"labels": pa.array(rows, pa.list_(pa.int32(), 3))})
    for name in ("rows.parquet", "rows.arrow"):
        found = TokenColumns(write(tmp_path / name, content))
        assert TokenStore.from_samples(found).tokens.tolist() == sum(rows, [])
        assert found[131]["labels"].tolist() == [131, 132, 133]


def test_every_files_columns_are_looked_at_before_a_row_is_read(tmp_path: Path) -> None:
    good = write(tmp_path / "a.parquet", table())
    for content, message in (
        (table([[1.0]], [[1.0]], FLOATS), "column 'tokens' of .*b.parquet has lists of float"),
        (pa.table({"tokens": [[1]], "labels": [1]}), "column 'labels' .* has the type int64"),
        (pa.table({"tokens": [[1]], "mask": [[1]]}), "b.parquet has no column 'labels'"),
    ):
        write(tmp_path / "b.parquet", content)
        with pytest.raises(ValueError, match=message):
            TokenColumns([good, tmp_path / "b.parquet"])
    twice = [pa.array([[1]])] * 3
    write(tmp_path / "b.parquet", pa.Table.from_arrays(twice, ["tokens", "tokens", "labels"]))
    with pytest.raises(ValueError, match="b.parquet has 2 columns 'tokens'; keep one"):
        TokenColumns(tmp_path / "b.parquet")


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_page_that_was_damaged_is_told_with_its_file(tmp_path: Path, has_checksums: bool) -> None:
    """With the checksums that Spark writes; without, where the page cannot be decoded any more."""
    rows = [[7 * i % 1000 for i in range(400)]] * 200
    options = {"use_dictionary": False, "compression": "none" if has_checksums else "gzip"}
    options["write_page_checksum"] = has_checksums
    path = Path(write(tmp_path / "rows.parquet", table(rows, rows), **options))
    assert len(TokenStore.from_samples(TokenColumns(path))) == 200
    data = bytearray(path.read_bytes())
    begin = 2000 if has_checksums else 100
    data[begin : begin + 8] = bytes(8)
    path.write_bytes(data)
    message = "the data file .*rows.parquet cannot be read as Parquet: .*; write it again"
    with pytest.raises(ValueError, match=message):
        TokenStore.build(tmp_path / "store", TokenColumns(path))
    assert not (tmp_path / "store").exists()


def test_files_that_are_missing_or_something_else_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder; name the files in it, for example .*/\*\."):
        TokenColumns(tmp_path)
    with pytest.raises(ValueError, match="the data file .*no.parquet does not exist"):
        TokenColumns(str(tmp_path / "no.parquet"))
    with pytest.raises(ValueError, match="no data files are given"):
        TokenColumns([])
    for name, kind in (("x.parquet", "Parquet"), ("x.arrow", "Arrow")):
        (tmp_path / name).write_text("not such a file")
        with pytest.raises(ValueError, match=f"x.* cannot be read as {kind}: "):
            TokenColumns(tmp_path / name)
    good = write(tmp_path / "good.parquet", table())
    other = write(tmp_path / "other.parquet", table().rename_columns(["tokens", "targets"]))
    with pytest.raises(ValueError, match="other.parquet has no column 'labels'"):
        TokenColumns([good, other])


def test_a_config_reads_parquet_and_its_content_is_in_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", table())
    node = OmegaConf.create(
        {
            "_component_": "torchtune_packing.datasets.packed_dataset",
            "source": {
                "_component_": "torchtune_packing.datasets.tokenized_dataset",
                "data_files": path,
            },
            "max_seq_len": 8,
            "cache_dir": str(tmp_path / "cache"),
        }
    )
    first = config.instantiate(node, None)
    check(first.store)
    assert config.instantiate(node, None).store.path == first.store.path
    write(tmp_path / "rows.parquet", table([[1, 2, 3]], [[1, 2, 3]]))
    changed = config.instantiate(node, None)
    assert changed.store.path != first.store.path and len(changed.store) == 1
    node.source.data_files = str(tmp_path / "no.parquet")
    with pytest.raises(ValueError, match="no.parquet, which does not exist"):
        config.instantiate(node, None)


def test_B55_files_of_one_name_in_several_folders_are_all_in_the_key(tmp_path: Path) -> None:
    """As Spark writes partitions: language=de/part-0.parquet, language=en/part-0.parquet."""
    node = {
        "_component_": "torchtune_packing.datasets.tokenized_dataset",
        "data_files": str(tmp_path / "*" / "*.parquet"),
    }

    def key() -> str:
        return source_key([node], None, labels_are_shifted=False)[0]

    for name in ("de", "en"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "part-0.parquet", table([[1]], [[1]]))
    keys = [key()]
    for name in ("de", "en"):
        write(tmp_path / name / "part-0.parquet", table([[2]], [[2]]))
        keys.append(key())
    (tmp_path / "en" / "part-0.parquet").unlink()
    keys.append(key())
    assert len(set(keys)) == 4


def test_B55_hashes_of_large_files_are_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchtune_packing.datasets.source_key as module

    path = tmp_path / "rows.parquet"
    node = {
        "_component_": "torchtune_packing.datasets.tokenized_dataset",
        "data_files": str(path),
    }
    monkeypatch.setattr(module, "_REMEMBER_FROM", 4)
    hashed: list[str] = []
    digest = module.file_digest
    monkeypatch.setattr(module, "file_digest", lambda p: hashed.append(p) or digest(p))

    def key(content: str, seconds: int) -> str:
        """The key with a file of some content, last written so many seconds after 1970."""
        path.write_text(content)
        os.utime(path, (seconds, seconds))
        hashed.clear()
        return source_key([node], None, labels_are_shifted=False, cache_dir=tmp_path / "c")[0]

    first = key("aaaa", 1000)
    assert hashed and key("aaaa", 1000) == first and not hashed
    assert key("bbbb", 1001) != first and hashed
    assert key("bbbbb", 1001) != key("bbbb", 1001)
    assert key("aaaa", 1002) == first
    # Written just now: it may change again within the clock's step, so it is not relied on.
    now = int(time.time())
    assert key("cccc", now) != key("dddd", now) and hashed
    (tmp_path / "c" / ".digests.json").write_text("{")
    assert key("aaaa", 1002) == first and hashed
    # What is small is read every time.
    monkeypatch.setattr(module, "_REMEMBER_FROM", 5)
    assert key("eeee", 2000) != key("ffff", 2000)


def test_B55_the_version_of_this_package_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"_component_": "torchtune_packing.datasets.tokenized_dataset", "data_files": "-"}
    before = source_key([node], None, labels_are_shifted=False)[0]
    monkeypatch.setattr("torchtune_packing.__version__", "99")
    assert source_key([node], None, labels_are_shifted=False)[0] != before


def test_columns_are_read_as_columns_among_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = TokenColumns(write(tmp_path / "rows.parquet", table()))
    samples = [{"tokens": row, "labels": row} for row in ([20, 21], [], [22])]
    joined = torch.utils.data.ConcatDataset([samples, columns, samples])
    expected = [20, 21, 22, *[token for row in ROWS for token in row], 20, 21, 22]
    store = TokenStore.from_samples(joined)
    assert store.tokens.tolist() == expected and store.empty.tolist() == [1, 4, 9]
    for size in (2, 3, 7):
        sharded = build_in_shards(tmp_path / str(size), "k", lambda: joined, shard_size=size)
        assert sharded.tokens.tolist() == expected and sharded.empty.tolist() == [1, 4, 9]
    monkeypatch.setattr(TokenColumns, "__getitem__", lambda *_: pytest.fail("read row by row"))
    assert TokenStore.from_samples(joined, num_workers=1).checksum == store.checksum
    bad = TokenColumns(write(tmp_path / "bad.parquet", table([[1], [1]], [[1], []])))
    with pytest.raises(ValueError, match=r"in source 1 of 2: sample 1 \(.*bad.parquet\) has 1"):
        TokenStore.from_samples(torch.utils.data.ConcatDataset([samples, bad]))


def test_rows_do_not_become_python_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.parquet", table())
    monkeypatch.setattr(
        "torchtune_packing.store.ingest.encode_samples",
        lambda *_: pytest.fail("a row was read as a sample"),
    )
    check(TokenStore.from_samples(TokenColumns(path)))
