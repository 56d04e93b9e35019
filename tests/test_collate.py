"""collate_packed: keys, padding, targets, the choice of the mask, loader workers, bad input."""

import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune.utils import batch_to_device

from tests.helpers import D
from tests.layouts import slow_mask
from torchtune_packing import PackedDataset, collate
from torchtune_packing.collate import collate_packed

_ = -100


def packs(*rows: list[int]) -> list[dict[str, torch.Tensor]]:
    """One pack per row of document lengths; document i of all has tokens 100 * i, 100 * i + 1, ...

    Labels equal the tokens, the first of each document too, so that the collate has to ignore it.
    """
    result, number = [], 0
    for lens in rows:
        tokens: list[int] = []
        for length in lens:
            number += 1
            tokens += range(100 * number, 100 * number + length)
        seq_lens = torch.tensor(lens)
        result.append(
            {"tokens": torch.tensor(tokens), "labels": torch.tensor(tokens), "seq_lens": seq_lens}
        )
    return result


def P(lens: list[int], max_seq_len: int, split: bool = False) -> PackedDataset:
    """The data set of the reported-fault cases."""
    return PackedDataset(
        D(lens), max_seq_len=max_seq_len, split_across_pack=split, strategy="sequential"
    )


def test_worked_example() -> None:
    batch = collate_packed(packs([3, 2], [4]), padding_idx=7, pad_to=6, mask=None)
    assert list(batch) == ["tokens", "labels", "input_pos", "seq_lens"]
    assert batch["tokens"].tolist() == [
        [100, 101, 102, 200, 201, 7],
        [300, 301, 302, 303, 7, 7],
    ]
    assert batch["labels"].tolist() == [[_, 101, 102, _, 201, _], [_, 301, 302, 303, _, _]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert batch["seq_lens"].tolist() == [[3, 2, 1], [4, 2, 0]]
    assert {key: value.dtype for key, value in batch.items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "input_pos": torch.int64,
        "seq_lens": torch.int32,
    }


def test_default_padding_is_to_the_longest_pack_and_a_full_row_has_no_tail() -> None:
    batch = collate_packed(packs([2, 3], [1]), mask=None)
    assert batch["tokens"].shape == (2, 5)
    assert batch["seq_lens"].tolist() == [[2, 3], [1, 4]]


def test_shift_labels_gives_aligned_targets() -> None:
    rows = packs([3, 2], [4], [6])
    plain = collate_packed(rows, pad_to=6, mask=None)["labels"]
    shifted = collate_packed(rows, pad_to=6, mask=None, shift_labels=True)["labels"]
    assert shifted.tolist() == [
        [101, 102, _, 201, _, _],
        [301, 302, 303, _, _, _],
        [401, 402, 403, 404, 405, _],
    ]
    # What a stock recipe does with the unshifted labels of the whole pack.
    assert torch.equal(shifted[:, :-1], plain[:, 1:])


def test_ignore_idx_replaces_every_untrained_label() -> None:
    rows = packs([3])
    rows[0]["labels"][1] = -100
    for shift, expected in ((False, [[-1, -1, 102, -1]]), (True, [[-1, 102, -1, -1]])):
        batch = collate_packed(rows, ignore_idx=-1, pad_to=4, shift_labels=shift, mask=None)
        assert batch["labels"].tolist() == expected


def test_packs_are_left_as_they_were() -> None:
    rows = packs([3, 2])
    before = {key: value.clone() for key, value in rows[0].items()}
    batch = collate_packed(rows, mask=None)
    batch["tokens"].zero_()
    batch["labels"].zero_()
    batch["seq_lens"].zero_()
    assert all(torch.equal(rows[0][key], before[key]) for key in before)


def test_lists_and_arrays_give_the_same_batch_as_tensors() -> None:
    rows = packs([3, 2], [4])
    expected = collate_packed(rows, mask=None)
    lists = [{key: value.tolist() for key, value in row.items()} for row in rows]
    arrays = [{key: value.numpy().astype(np.int32) for key, value in row.items()} for row in rows]
    frozen = [{key: value.numpy().copy() for key, value in row.items()} for row in rows]
    for array in frozen:
        array["tokens"].flags.writeable = False  # torch warns when it shares such memory
    for given in (lists, arrays, frozen, [{**row, "extra": object()} for row in lists]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batch = collate_packed(given, mask=None)
        assert all(torch.equal(batch[key], expected[key]) for key in expected)


def test_pad_to_multiple_of_rounds_up_after_pad_to() -> None:
    rows = packs([3, 2], [4])
    assert collate_packed(rows, pad_to_multiple_of=4, mask=None)["tokens"].shape == (2, 8)
    assert collate_packed(rows, pad_to=9, pad_to_multiple_of=4, mask=None)["tokens"].shape[1] == 12
    assert collate_packed(rows, pad_to=8, pad_to_multiple_of=4, mask=None)["tokens"].shape[1] == 8


def test_pad_documents_to_keeps_the_width_of_seq_lens() -> None:
    batch = collate_packed(packs([3, 2], [4]), pad_to=6, pad_documents_to=5, mask=None)
    assert batch["seq_lens"].tolist() == [[3, 2, 1, 0, 0], [4, 2, 0, 0, 0]]
    with pytest.raises(ValueError, match="pad_documents_to is 2, .* 3 documents"):
        collate_packed(packs([3, 2], [4]), pad_to=6, pad_documents_to=2, mask=None)
    full = collate_packed(packs([3, 2]), pad_documents_to=2, mask=None)
    assert full["seq_lens"].tolist() == [[3, 2]]


def test_positions_stay_below_the_pack_length_in_the_padding_too() -> None:
    # One token of at most 5, rounded up to 64: the tail of 63 pads must not leave a table of 5.
    batch = collate_packed(packs([1], [5]), pad_to_multiple_of=64, mask=None)
    assert batch["input_pos"].max() == 4
    assert batch["input_pos"][0, :7].tolist() == [0, 0, 1, 2, 3, 4, 4]
    exact = collate_packed(packs([1], [5]), pad_to=32, mask=None)
    assert exact["input_pos"][0].tolist() == [0, *range(31)]


def test_B1_no_target_crosses_a_document_boundary() -> None:
    data = P([3, 2], 6)
    targets = collate_packed([data[0]], pad_to=6, shift_labels=True, mask=None)["labels"]
    assert targets.tolist() == [[101, 102, _, 201, _, _]]
    assert int((targets != _).sum()) == 3
    # A stock recipe pops the labels and shifts the whole pack by itself.
    labels = collate_packed([data[0]], pad_to=6)["labels"]
    stock = torch.hstack((labels[..., 1:], torch.full((1, 1), _)))
    assert torch.equal(stock, targets)


def test_B3_positions_restart_in_every_document_and_never_wrap() -> None:
    data = P([4, 8], 6, split=True)
    batch = collate_packed([data[0], data[1]], mask=None)
    assert batch["seq_lens"].tolist() == [[4, 2], [6, 0]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_B10_copy_of_a_document_is_masked_from_the_first() -> None:
    mask = collate_packed(packs([20, 20]))["mask"]
    assert not mask[0, 20:, :20].any()


def test_B34_padding_sees_itself_and_nothing_real() -> None:
    mask = collate_packed([P([3], 8)[0]], pad_to=8)["mask"]
    assert torch.equal(mask, slow_mask([[3, 5]]))
    assert mask.any(-1).all()


def test_B36_mask_has_as_many_rows_as_the_smaller_last_batch() -> None:
    data = P([3] * 20, 12)
    assert len(data) == 5
    for kind in ("bool", "flex"):
        loader = DataLoader(data, batch_size=2, collate_fn=partial(collate_packed, mask=kind))
        for batch, rows in zip(loader, (2, 2, 1), strict=True):
            assert batch["tokens"].shape == (rows, 12)
            assert batch["mask"].shape[0] == rows


def test_B33_workers_give_the_same_plain_batches_and_never_touch_cuda(monkeypatch) -> None:
    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError("a worker touched CUDA")

    for name in ("_lazy_init", "is_available", "current_device", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, touched)
    data = P([3] * 40, 12)
    make = partial(DataLoader, data, batch_size=2, collate_fn=partial(collate_packed, mask=None))
    alone = list(make(num_workers=0))
    # fork: the workers inherit the patched functions.
    with_workers = list(make(num_workers=2, multiprocessing_context="fork"))
    assert len(alone) == len(with_workers) == 5
    for ours, theirs in zip(alone, with_workers, strict=True):
        assert list(ours) == list(theirs) == ["tokens", "labels", "input_pos", "seq_lens"]
        for key in ours:
            assert torch.equal(ours[key], theirs[key])
            assert theirs[key].device.type == "cpu"
        again = pickle.loads(pickle.dumps(theirs))
        assert all(torch.equal(again[key], theirs[key]) for key in theirs)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_B33_loader_state_pickles_in_the_middle_of_an_epoch(num_workers: int) -> None:
    data = P([3] * 40, 12)

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(
            data,
            batch_size=2,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
            collate_fn=partial(collate_packed, mask=None),
        )

    first = loader()
    batches = iter(first)
    next(batches)
    next(batches)
    state = pickle.dumps(first.state_dict())
    expected = list(batches)
    resumed = loader()
    resumed.load_state_dict(pickle.loads(state))
    rest = list(resumed)
    assert len(rest) == len(expected) == 3
    for ours, theirs in zip(rest, expected, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
        assert torch.equal(ours["seq_lens"], theirs["seq_lens"])


def test_B33_a_worker_refuses_a_cuda_mask() -> None:
    loader = DataLoader(
        P([3], 12),
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=partial(collate_packed, mask="auto", device="cuda"),
    )
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=r"loader worker.*mask=None.*num_workers=0"):
        next(batches)
    with pytest.raises(StopIteration):  # ends the worker
        next(batches)


def test_B33_a_worker_refuses_a_block_mask_and_takes_a_bool_mask(monkeypatch) -> None:
    pretend_cuda(monkeypatch, bytes_in_use=10**9)
    monkeypatch.setattr(collate, "get_worker_info", object)
    for mask, device in (("flex", None), ("flex", "cpu"), ("auto", "cuda"), ("bool", "cuda:1")):
        with pytest.raises(RuntimeError, match=f"mask='{mask}'"):
            collate_packed(packs([3, 2]), mask=mask, device=device)
    assert isinstance(collate_packed(packs([3, 2]))["mask"], torch.Tensor)


def test_stock_call_on_a_cpu_gives_what_its_model_takes() -> None:
    batch = collate_packed(packs([3, 2], [4]), padding_idx=0, ignore_idx=-100)
    assert list(batch) == ["tokens", "labels", "input_pos", "mask"]
    assert torch.equal(batch["mask"], slow_mask([[3, 2], [4, 1]]))
    batch_to_device(batch, torch.device("cpu"))


def pretend_cuda(monkeypatch, *, bytes_in_use: int, capability: tuple[int, int] = (9, 0)) -> None:
    """A machine with a CUDA device, as far as the choice of the mask asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: bytes_in_use)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_B32_an_idle_gpu_does_not_change_the_mask_of_a_cpu_run(monkeypatch) -> None:
    # Importing torchtune starts CUDA where there is one; a CPU run holds no memory there.
    pretend_cuda(monkeypatch, bytes_in_use=0)
    batch = collate_packed(packs([3, 2]))
    assert isinstance(batch["mask"], torch.Tensor) and batch["mask"].device.type == "cpu"
    pretend_cuda(monkeypatch, bytes_in_use=10**9)
    named = collate_packed(packs([3, 2]), device="cpu")
    assert isinstance(named["mask"], torch.Tensor) and named["mask"].device.type == "cpu"


@pytest.mark.parametrize(
    ("mask", "device", "capability", "expected"),
    [
        ("auto", None, (7, 5), ("cuda:0", "flex")),
        ("auto", None, (7, 0), ("cuda:0", "bool")),
        ("auto", "cuda:1", (9, 0), ("cuda:1", "flex")),
        ("bool", None, (9, 0), ("cuda:0", "bool")),
        ("flex", "cpu", (9, 0), ("cpu", "flex")),
    ],
)
def test_mask_follows_the_device(monkeypatch, mask, device, capability, expected) -> None:
    pretend_cuda(monkeypatch, bytes_in_use=10**9, capability=capability)
    where, kind = collate._choose_mask(mask, device)
    assert (str(where), kind) == expected


@pytest.mark.gpu
def test_stock_call_on_a_cuda_device_gives_a_block_mask_there() -> None:
    model = torch.ones(1, device="cuda")  # what tells that this process trains there
    batch = collate_packed(packs([3, 2], [4]), padding_idx=0, ignore_idx=-100)
    assert isinstance(batch["mask"], BlockMask)
    assert batch["mask"].kv_indices.device == model.device
    batch_to_device(batch, model.device)


def test_flex_on_a_cpu_gives_a_block_mask() -> None:
    batch = collate_packed(packs([3, 2], [4]), mask="flex")
    assert isinstance(batch["mask"], BlockMask)
    assert batch["mask"].shape == (2, 1, 5, 5)
    assert "seq_lens" not in batch


def test_no_s_times_s_tensor_unless_a_mask_is_asked_for() -> None:
    batch = collate_packed(packs([4096]), mask=None)
    assert max(value.numel() for value in batch.values()) == 4096
    with pytest.raises(ValueError, match="bool mask for 1 rows of 50,000 positions"):
        collate_packed(packs([50_000]), mask="bool")


def broken(**changes: object) -> list[dict[str, object]]:
    """A good pack and a changed one; None takes the key away."""
    pack: dict[str, object] = {**packs([3, 2])[0], **changes}
    return [*packs([1]), {key: value for key, value in pack.items() if value is not None}]


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ([], {}, "batch is empty"),
        (broken(seq_lens=None), {}, r"Item 1 .* no seq_lens.*packed_dataset.*collate_flattened"),
        ([[1, 2, 3]], {}, "Item 0 .* is no pack"),
        (
            broken(labels=None),
            {},
            r"Item 1 .* needs the keys tokens and labels, but has .*seq_lens",
        ),
        (broken(labels=[1, 2]), {}, r"tokens of shape \[5\] and labels of shape \[2\]"),
        (broken(tokens=[[1] * 5], labels=[[1] * 5]), {}, r"tokens of shape \[1, 5\]"),
        (broken(seq_lens=[3, 1]), {}, r"Item 1 .* seq_lens \[3, 1\] for 5 tokens"),
        (broken(seq_lens=[5, 0]), {}, r"seq_lens \[5, 0\] for 5 tokens; they must be positive"),
        (broken(seq_lens=[6, -1]), {}, "must be positive"),
        (broken(tokens=[], labels=[], seq_lens=[]), {}, "Item 1 .* empty pack"),
        (packs([3, 2]), {"pad_to": 4}, "pad_to is 4, .* 5 tokens.*max_seq_len"),
        (packs([3, 2]), {"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0"),
        (packs([3, 2]), {"mask": "dense"}, "mask is 'dense'"),
        (packs([3, 2]), {"mask": None, "device": "cpu"}, "mask=None returns CPU tensors only"),
    ],
)
def test_bad_input_is_named(batch, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        collate_packed(batch, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_a_cuda_mask_without_a_cuda_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device is cuda, but there is no CUDA device"):
        collate_packed(packs([3, 2]), device="cuda")
