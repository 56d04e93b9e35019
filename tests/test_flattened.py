"""collate_flattened: against transformers' flattening collator, and against the padded batch."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from torchtune.data import padded_collate_sft
from torchtune.models.llama3 import llama3
from transformers import DataCollatorWithFlattening

from tests.layouts import slow_mask
from torchtune_packing.collate import collate_flattened, collate_packed
from torchtune_packing.masks import cu_seqlens

_ = -100


def random_samples(seed: int, count: int, longest: int) -> list[dict[str, list[int]]]:
    """Samples of 1 to ``longest`` tokens, a prompt of random length not trained."""
    rng = random.Random(seed)
    samples = []
    for _index in range(count):
        tokens = [rng.randrange(1, 50) for _t in range(rng.randint(1, longest))]
        prompt = rng.randint(0, len(tokens))
        samples.append({"tokens": tokens, "labels": [_] * prompt + tokens[prompt:]})
    return samples


def test_worked_example() -> None:
    samples = [
        {"tokens": [5, 6, 7], "labels": [5, 6, 7]},
        {"tokens": [], "labels": []},
        {"tokens": [8], "labels": [8]},
        {"tokens": [9, 4], "labels": [9, 4]},
    ]
    batch = collate_flattened(samples, mask=None)
    assert list(batch) == ["tokens", "labels", "input_pos", "seq_lens"]
    assert batch["tokens"].tolist() == [[5, 6, 7, 8, 9, 4]]
    assert batch["labels"].tolist() == [[_, 6, 7, _, _, 4]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["seq_lens"].tolist() == [[3, 1, 2]]
    assert batch["seq_lens"].dtype == torch.int32 and batch["tokens"].dtype == torch.int64
    shifted = collate_flattened(samples, mask=None, shift_labels=True)
    assert shifted["labels"].tolist() == [[6, 7, _, _, 4, _]]


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_flattening_collator_of_transformers(seed: int) -> None:
    samples = random_samples(seed, count=7, longest=40)
    samples.insert(seed, {"tokens": [], "labels": []})
    ours = collate_flattened(samples, mask=None)
    oracle = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    theirs = oracle(
        [{"input_ids": sample["tokens"], "labels": sample["labels"]} for sample in samples]
    )
    assert torch.equal(ours["tokens"], theirs["input_ids"])
    assert torch.equal(ours["labels"], theirs["labels"])
    assert torch.equal(ours["input_pos"], theirs["position_ids"])
    boundaries, longest = cu_seqlens(ours["seq_lens"])
    assert torch.equal(boundaries, theirs["cu_seq_lens_q"])
    assert boundaries.dtype == theirs["cu_seq_lens_q"].dtype
    assert longest == theirs["max_length_q"]


def test_padding_to_a_multiple_is_one_last_document_with_safe_positions() -> None:
    samples = [{"tokens": [5, 6, 7], "labels": [5, 6, 7]}, {"tokens": [8], "labels": [8]}]
    batch = collate_flattened(samples, padding_idx=1, ignore_idx=-1, pad_to_multiple_of=8)
    assert batch["tokens"].tolist() == [[5, 6, 7, 8, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-1, 6, 7, -1, -1, -1, -1, -1]]
    # The model's table may be as short as the longest sample.
    assert batch["input_pos"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 2]]
    assert torch.equal(batch["mask"], slow_mask([[3, 1, 4]]))
    plain = collate_flattened(samples, pad_to_multiple_of=8, pad_documents_to=5, mask=None)
    assert plain["seq_lens"].tolist() == [[3, 1, 4, 0, 0]]
    exact = collate_flattened(samples, pad_to_multiple_of=4, mask=None)
    assert exact["seq_lens"].tolist() == [[3, 1]]


def test_packs_keep_their_documents() -> None:
    pack = {"tokens": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "seq_lens": [3, 2]}
    sample = {"tokens": [6, 7], "labels": [6, 7]}
    batch = collate_flattened([pack, sample], mask=None)
    assert batch["seq_lens"].tolist() == [[3, 2, 2]]
    assert batch["labels"].tolist() == [[_, 2, 3, _, 5, _, 7]]
    row = collate_packed([{**pack, "tokens": [1, 2, 3, 4, 5]}], mask=None)
    alone = collate_flattened([pack], mask=None)
    assert all(torch.equal(row[key], alone[key]) for key in row)


def test_samples_that_are_tensors_are_left_as_they_were() -> None:
    tokens = torch.arange(5)
    batch = collate_flattened([{"tokens": tokens, "labels": tokens}], mask=None)
    batch["tokens"].zero_()
    assert tokens.tolist() == [0, 1, 2, 3, 4]


def test_block_mask_of_one_row() -> None:
    batch = collate_flattened(random_samples(0, 5, 60), mask="flex")
    assert isinstance(batch["mask"], BlockMask)
    total = batch["tokens"].numel()
    assert batch["mask"].shape == (1, 1, total, total)
    assert "seq_lens" not in batch


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_loss_and_gradients_equal_those_of_the_padded_batch() -> None:
    torch.manual_seed(0)
    model = llama3(
        vocab_size=50,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        max_seq_len=128,  # torchtune compares it with the row, not with the positions
        intermediate_dim=64,
    ).double()
    samples = random_samples(3, count=6, longest=30)

    def sum_loss(batch: dict, **kwargs: torch.Tensor) -> torch.Tensor:
        logits = model(batch["tokens"], **kwargs)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=_)  # what a stock recipe does
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    padded = padded_collate_sft(samples, padding_idx=0, ignore_idx=_)
    expected = sum_loss(padded)
    flat = collate_flattened(samples, padding_idx=0, ignore_idx=_, pad_to_multiple_of=16)
    ours = sum_loss(flat, mask=flat["mask"], input_pos=flat["input_pos"])
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=0)
    parameters = list(model.parameters())
    for grad, reference in zip(
        torch.autograd.grad(ours, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(grad, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "None of the 0 samples"),
        ([{"tokens": [], "labels": []}] * 2, "None of the 2 samples of the batch holds a token"),
        ([{"tokens": [1, 2], "labels": [1]}], r"Item 0 .* \[2\] and labels of shape \[1\]"),
        ([{"tokens": [1, 2]}], "Item 0 .* needs the keys tokens and labels"),
        ([{"tokens": [1, 2], "labels": [1, 2], "seq_lens": [1]}], r"seq_lens \[1\] for 2 tokens"),
    ],
)
def test_bad_input_is_named(batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate_flattened(batch)
