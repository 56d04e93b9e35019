"""TokenStore in memory: what goes in, what is refused, and with which words."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import D
from torchtune_packing.store import TokenStore
from torchtune_packing.store.ingest import SampleReadError


def store_of(*samples: object) -> TokenStore:
    """A store of some samples."""
    return TokenStore.from_samples(list(samples))


def test_documents_lie_end_to_end_and_empty_samples_shift_the_index() -> None:
    store = TokenStore.from_samples(D([0, 3, 0, 0, 2, 1, 0]))
    assert store.tokens.tolist() == [200, 201, 202, 500, 501, 600]
    assert store.labels.tolist() == store.tokens.tolist()
    assert store.seq_lens.tolist() == [3, 2, 1]
    assert store.offsets.tolist() == [0, 3, 5, 6]
    assert store.trained.tolist() == [2, 1, 0]
    assert [store.sample_index(i) for i in range(3)] == [1, 4, 5]
    assert store.empty.tolist() == [0, 2, 3, 6]
    assert (store.tokens.dtype, store.seq_lens.dtype, store.offsets.dtype) == (
        np.int32,
        np.int32,
        np.int64,
    )
    assert store.accounting.as_dict() == {
        "num_samples": 7,
        "num_empty": 4,
        "num_documents": 3,
        "num_tokens": 6,
        "num_labels": 6,
        "num_trained_tokens": 3,
        "num_untrained_documents": 1,
        "num_untrained_tokens": 1,
        "num_lost_labels": 0,
        "largest_id": 600,
    }
    assert store.document(1)["tokens"].tolist() == [500, 501]


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        lambda v: np.array(v, dtype=np.int64),
        lambda v: np.array(v, dtype=np.uint16),
        lambda v: torch.tensor(v),
        lambda v: torch.tensor(v, dtype=torch.int32),
        lambda v: array("q", v),
        lambda v: list(np.array(v)),
        lambda v: range(v[0], v[-1] + 1),
    ],
)
def test_lists_arrays_and_tensors_are_taken(kind: object) -> None:
    store = store_of({"tokens": kind([7, 8, 9]), "labels": kind([7, 8, 9])})
    assert store.tokens.tolist() == store.labels.tolist() == [7, 8, 9]


def test_torchtunes_own_labels_are_taken() -> None:
    # torchtune 0.6.1 yields labels as a list of numpy integers.
    labels = list(np.where([True, False, False], -100, [1, 2, 3]))
    store = store_of({"tokens": [1, 2, 3], "labels": labels})
    assert store.labels.tolist() == [-100, 2, 3]


def test_the_ends_of_int32_are_taken() -> None:
    ends = [0, 2**31 - 1]
    assert store_of({"tokens": ends, "labels": ends}).tokens.tolist() == ends


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("how", ["map", "iterable", "workers", "files"])
@pytest.mark.parametrize(
    ("name", "value"), [("tokens", -1), ("tokens", -100), ("labels", -1), ("labels", -101)]
)
def test_negative_ids_are_refused_by_sample(
    tmp_path: Path, kind: Any, how: str, name: str, value: int
) -> None:
    """Of samples of 2, 0, 3 and 1 tokens the third has one in the middle."""
    samples = [{"tokens": [4] * n, "labels": [4] * n} for n in (2, 0, 3, 1)]
    samples[2][name][1] = value
    samples = [{key: kind(values) for key, values in sample.items()} for sample in samples]
    with pytest.raises(ValueError, match=f"sample 2 has {value} among its {name}; token ids are 0"):
        if how == "files":
            TokenStore.build(tmp_path / "store", samples)
        else:
            source = iter(samples) if how == "iterable" else samples
            TokenStore.from_samples(source, num_workers=2 if how == "workers" else 0)
    assert not list(tmp_path.iterdir())


def test_largest_id_is_that_of_tokens_and_labels(tmp_path: Path) -> None:
    samples = [{"tokens": [1, 7], "labels": [-100, 9]}, {"tokens": [8], "labels": [-100]}]
    assert TokenStore.from_samples(samples).accounting.largest_id == 9
    assert TokenStore.build(tmp_path / "a", samples[1:]).accounting.largest_id == 8
    assert TokenStore.open(tmp_path / "a").accounting.largest_id == 8


GOOD = {"tokens": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"tokens": [1, 2, 3], "labels": [1, 2]}, "sample 1 has 3 tokens but 2 labels"),
        ({"tokens": [1]}, "sample 1 has no 'labels', only the keys"),
        ({"labels": [1]}, "sample 1 has no 'tokens', only the keys"),
        ({"text": "x"}, "sample 1 has no 'tokens' and 'labels'"),
        ([1, 2], "sample 1 is a list; a sample must be a dict"),
        (None, "sample 1 is a NoneType"),
        ({"chosen": [1], "rejected": [1]}, "sample 1 .*preference data"),
        ({"tokens": [1, 2.5], "labels": [1, 2]}, r"sample 1 has 2.5 \(float\) at position 1"),
        ({"tokens": [1, 2], "labels": [1, None]}, r"sample 1 has None \(NoneType\) at position 1"),
        ({"tokens": [1, "a"], "labels": [1, 2]}, r"sample 1 has 'a' \(str\) at position 1"),
        ({"tokens": "ab", "labels": [1, 2]}, "sample 1 has tokens of shape"),
        ({"tokens": [1, 2], "labels": [True, False]}, r"sample 1 has True \(bool\)"),
        ({"tokens": [1, 2**31], "labels": [1, 2]}, "sample 1 has 2147483648 .*outside of int32"),
        ({"tokens": [1, -(2**31) - 1], "labels": [1, 2]}, "outside of int32"),
        ({"tokens": np.array([1.0]), "labels": [1]}, "sample 1 has tokens of dtype float64"),
        ({"tokens": np.array([True]), "labels": [1]}, "sample 1 has tokens of dtype bool"),
        ({"tokens": torch.tensor([1.0]), "labels": [1]}, "sample 1 has tokens of dtype float32"),
        ({"tokens": np.array([2**40]), "labels": [1]}, "sample 1 has 1099511627776"),
        ({"tokens": np.array([[1]]), "labels": [1]}, r"sample 1 has tokens of shape \[1, 1\]"),
        ({"tokens": torch.tensor(3), "labels": [1]}, r"sample 1 has tokens of shape \[\]"),
        ({"tokens": [[1]], "labels": [[1]]}, r"sample 1 has \[1\] \(list\) at position 0"),
        ({"tokens": 5, "labels": 5}, r"sample 1 has tokens of shape \[\] and type int"),
    ],
)
def test_a_bad_sample_is_refused_by_its_index(sample: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store_of(GOOD, sample)


def test_a_source_that_raises_is_named_with_the_sample() -> None:
    class Broken(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            if index == 2:
                raise KeyError("answer")
            return super().__getitem__(index)

    with pytest.raises(SampleReadError, match="reading sample 2 .*KeyError: 'answer'") as caught:
        TokenStore.from_samples(Broken([1, 2, 3]))
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_iterable_without_length_is_read_once() -> None:
    store = TokenStore.from_samples(sample for sample in (GOOD, GOOD))
    assert store.seq_lens.tolist() == [2, 2]
    with pytest.raises(ValueError, match="sample 1 has no 'labels'"):
        TokenStore.from_samples(iter([GOOD, {"tokens": []}]))


def test_chunks_do_not_show_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ds = D(rng.integers(0, 30, 500).tolist())
    whole = TokenStore.from_samples(ds, labels_are_shifted=True)
    monkeypatch.setattr("torchtune_packing.store.ingest._MAX_CHUNK_TOKENS", 20)
    small = TokenStore.from_samples(ds, labels_are_shifted=True)
    for name in ("tokens", "labels", "seq_lens", "trained", "empty"):
        assert getattr(whole, name).tolist() == getattr(small, name).tolist()
    assert whole.accounting == small.accounting
