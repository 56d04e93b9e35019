"""PackedDataset: what a pack holds, what is refused, what is counted."""

import logging
import pickle
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.helpers import D
from torchtune_packing import PackedDataset
from torchtune_packing.store import TokenStore


def P(lens: Sequence[int], max_seq_len: int, split: bool = False, **kwargs: object):
    """The packed data set of the cases: sequential, over ``D(lens)``."""
    arguments = {"strategy": "sequential", "padding_idx": 0} | kwargs
    return PackedDataset(D(lens), max_seq_len=max_seq_len, split_across_pack=split, **arguments)


class Samples(list):
    """A list of samples as a data set."""


def real_seq_lens(ds: PackedDataset) -> list[list[int]]:
    """Document lengths of every pack, without padding."""
    return [pack["seq_lens"].tolist() for pack in (ds[i] for i in range(len(ds)))]


def with_tail(ds: PackedDataset) -> list[list[int]]:
    """The same with the padding tail as one last segment, as the cases write it."""
    return [
        lens + [ds.max_seq_len - sum(lens)] * (sum(lens) < ds.max_seq_len)
        for lens in real_seq_lens(ds)
    ]


def targets(labels: torch.Tensor, length: int) -> list[int]:
    """What a loss sees that shifts a whole padded pack by one."""
    padded = labels.tolist() + [-100] * (length - len(labels))
    return padded[1:] + [-100]


def test_B1_shifting_a_whole_pack_trains_nothing_across_a_boundary() -> None:
    ds = P([3, 2], 6)
    assert targets(ds[0]["labels"], 6) == [101, 102, -100, 201, -100, -100]
    assert ds.stats.num_trained_tokens == 3


def test_a_pack_holds_fresh_int64_tensors_of_real_documents_only() -> None:
    ds = P([3, 2], 6)
    pack = ds[0]
    assert set(pack) == {"tokens", "labels", "seq_lens"}
    assert pack["tokens"].tolist() == [100, 101, 102, 200, 201]
    assert pack["labels"].tolist() == [-100, 101, 102, -100, 201]
    assert pack["seq_lens"].tolist() == [3, 2]
    assert {value.dtype for value in pack.values()} == {torch.int64}
    pack["tokens"].zero_()
    pack["seq_lens"].zero_()
    assert ds[0]["tokens"].tolist() == [100, 101, 102, 200, 201]
    assert ds[0]["seq_lens"].tolist() == [3, 2]


def test_indices_count_from_both_ends_and_stop_there() -> None:
    ds = P([4, 4, 4], 4)
    assert len(ds) == 3
    assert ds[-1]["tokens"].tolist() == ds[2]["tokens"].tolist() == [300, 301, 302, 303]
    for index in (3, -4):
        with pytest.raises(IndexError, match=rf"pack {index} does not exist; there are 3 packs"):
            ds[index]
    assert [len(pack["tokens"]) for pack in ds] == [4, 4, 4]


def test_B3_positions_restart_at_every_fragment() -> None:
    assert with_tail(P([4, 8], 6, True)) == [[4, 2], [6]]


def test_B46_samples_longer_than_a_pack_are_cut_as_often_as_needed() -> None:
    assert with_tail(P([121], 60, True)) == [[60], [60], [1, 59]]
    many = with_tail(P([30] * 10 + [61], 60, True))
    assert len(many) == 7 and many[-2:] == [[60], [1, 59]]
    assert with_tail(P([8, 8], 8, True)) == [[8], [8]]


def test_B47_every_policy_for_an_overlong_sample() -> None:
    with pytest.raises(ValueError, match=r"sample 1 .*9 > 8.*max_seq_len.*'drop'"):
        P([5, 9, 3], 8)
    drop = P([5, 9, 3], 8, overlong="drop")
    assert with_tail(drop) == [[5, 3]]
    assert (drop.stats.num_dropped_documents, drop.stats.num_dropped_tokens) == (1, 9)
    truncate = P([5, 9, 3], 8, overlong="truncate")
    assert with_tail(truncate) == [[5, 3], [8], [3, 5]]
    assert truncate.stats.num_truncated_documents == truncate.stats.num_truncated_tokens == 1
    assert truncate.stats.num_trained_tokens == 4 + 7 + 2
    assert "1 document truncated (1 token)" in str(truncate.stats)
    split = P([5, 9, 3], 8, overlong="split")
    assert with_tail(split) == [[5, 3], [6, 2], [1, 7]]
    assert (split.stats.num_split_documents, split.stats.num_cuts) == (2, 2)


def test_B47_the_index_of_an_overlong_sample_counts_empty_samples() -> None:
    with pytest.raises(ValueError, match=r"sample 3 .*\(9 > 8 tokens\), and 1 more"):
        P([0, 5, 0, 9, 10], 8)


def test_B48_empty_samples_are_skipped_and_counted() -> None:
    ds = P([0, 3, 0, 2], 6)
    assert with_tail(ds) == [[3, 2, 1]]
    assert ds.stats.num_empty == 2 and ds.stats.num_samples == 4
    assert "2 empty samples skipped" in str(ds.stats)
    for lens in ([0, 0], []):
        with pytest.raises(ValueError, match="no non-empty samples"):
            P(lens, 6)


def test_B50_fill_is_logged_and_low_fill_warns_with_what_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="torchtune_packing"):
        ds = P([5, 6, 2, 3], 8)
    assert with_tail(ds) == [[5, 3], [6, 2], [3, 5]]
    assert "16/24" in caplog.text
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "strategy='best_fit' would need 2 packs (fill 100.0 %)" in warnings[0]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="torchtune_packing"):
        ds = P([5, 6, 2, 3], 8, strategy="best_fit")
    assert len(ds) == 2 and ds.stats.fill == 1.0
    assert "16/16" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("lens", "max_seq_len", "advice"),
    [
        # Documents just over half a pack: two never share one, three share a pack twice as long.
        ([5, 5, 5], 8, r"\(15/24 in 3 packs\); max_seq_len=16 with .* would fill 93.8 %"),
        ([2, 2, 2], 3, r"\(6/9 in 3 packs\); max_seq_len=6 with .* would fill 100.0 %"),
        # 7s: 2 in 20 is no better than 1 in 10; only cutting helps.
        ([7, 7, 7, 7, 7], 10, r"\(35/50 in 5 packs\); split_across_pack=True .* need 4 packs"),
    ],
)
def test_B50_low_fill_of_best_fit_is_told_what_would_raise_it(
    lens: list[int], max_seq_len: int, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="torchtune_packing"):
        P(lens, max_seq_len, strategy="best_fit")
    assert len(caplog.records) == 1
    assert re.search(advice, caplog.text), caplog.text


def test_B50_few_packs_that_cannot_be_fewer_do_not_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    P([121], 60, True)
    P([3], 100)
    assert not caplog.records


def test_B52_the_target_across_a_cut_is_lost_and_counted() -> None:
    ds = P([4, 4, 4], 6, True)
    assert with_tail(ds) == [[4, 2], [2, 4]]
    assert ds[0]["labels"].tolist() == [-100, 101, 102, 103, -100, 201]
    assert ds[1]["labels"].tolist() == [-100, 203, -100, 301, 302, 303]
    assert targets(ds[0]["labels"], 6)[5] == -100
    assert ds.stats.num_targets_lost_at_cuts == 1
    assert ds.stats.num_trained_tokens == 3 * 3 - 1


def test_B52_a_pack_of_masked_prompt_only_is_a_pack_like_others() -> None:
    ds = PackedDataset(
        Samples([{"tokens": [1, 2, 3, 4, 5, 6], "labels": [-100] * 4 + [5, 6]}]),
        max_seq_len=4,
        split_across_pack=True,
    )
    assert ds[0]["labels"].tolist() == [-100] * 4
    assert ds[1]["labels"].tolist() == [-100, 6]
    assert ds.stats.num_targets_lost_at_cuts == 1
    assert ds.stats.num_trained_tokens == 1


def test_B53_a_pack_is_tokens_labels_and_lengths_and_the_store_8_bytes_a_token() -> None:
    ds = P([512, 512, 1024] * 4, 2048)
    pack = ds[0]
    assert sum(value.nbytes for value in pack.values()) <= 3 * 8 * 2048 + 8 * 3
    stored = ds.store.tokens.nbytes + ds.store.labels.nbytes
    assert stored == 8 * 2048 * 4
    per_document = ds.store.seq_lens.nbytes + ds.store.trained.nbytes + ds.store.empty.nbytes
    assert per_document == 8 * 12


def test_B13_masks_survive_and_unknown_keys_are_ignored() -> None:
    samples = Samples(
        {
            "tokens": [1, 2, 3, 4],
            "labels": [-100, -100, 3, 4],
            "mask": [True, True, False, False],
            "source": "unknown",
        }
        for _ in range(2)
    )
    ds = PackedDataset(samples, max_seq_len=8)
    assert targets(ds[0]["labels"], 8) == [-100, 3, 4, -100, -100, 3, 4, -100]
    with pytest.raises(ValueError, match=r"sample 1 has no 'labels'.*'mask' alone"):
        PackedDataset([samples[0], {"tokens": [1], "mask": [True]}], max_seq_len=8)


def test_B15_samples_without_a_trained_token_are_counted_and_alone_refused() -> None:
    prompt_only = {"tokens": list(range(8)), "labels": [-100] * 8}
    normal = {"tokens": [1, 2], "labels": [-100, 2]}
    ds = PackedDataset([prompt_only, normal], max_seq_len=8)
    assert (ds.stats.num_untrained_documents, ds.stats.num_untrained_tokens) == (1, 8)
    assert "1 sample without trainable tokens" in str(ds.stats)
    with pytest.raises(ValueError, match="none of the 2 samples has a trained token"):
        PackedDataset([prompt_only, prompt_only], max_seq_len=8)


def test_B15_truncation_that_cuts_every_answer_off_is_refused() -> None:
    sample = {"tokens": list(range(13)), "labels": [-100] * 10 + [10, 11, 12]}
    with pytest.raises(ValueError, match="none of the 1 samples has a trained token within a pack"):
        PackedDataset([sample], max_seq_len=8, overlong="truncate")
    ds = PackedDataset(
        [sample, {"tokens": [1, 2], "labels": [1, 2]}], max_seq_len=8, overlong="truncate"
    )
    assert ds.stats.num_untrained_documents == 1
    assert ds.stats.num_trained_tokens == 1


def test_B59_two_short_samples_make_one_pack(caplog: pytest.LogCaptureFixture) -> None:
    ds = P([3, 2], 2048, strategy="best_fit")
    assert len(ds) == 1
    assert len(ds[0]["tokens"]) == 5
    assert not caplog.records


def test_shifted_labels_become_unshifted() -> None:
    shifted = [
        {"tokens": [1, 2, 3], "labels": [2, 3, -100]},
        {"tokens": [], "labels": []},
        {"tokens": [4, 5], "labels": [-100, -100]},
        {"tokens": [6, 7], "labels": [7, 8]},
    ]
    ds = PackedDataset(shifted, max_seq_len=16, strategy="sequential", labels_are_shifted=True)
    assert ds.store.labels.tolist() == [-100, 2, 3, -100, -100, -100, 7]
    assert ds.store.trained.tolist() == [2, 0, 1]
    assert ds.store.accounting.num_lost_labels == 1


def test_labels_of_the_next_token_are_refused_unless_they_are_said_to_be_that() -> None:
    """Prompts of 3, answers of 6 tokens, no two alike; shifted as others' collators do it."""
    whole = [list(range(10 * n, 10 * n + 9)) for n in range(4)]
    shifted = [{"tokens": t, "labels": [-100, -100, *t[3:], -100]} for t in whole]
    with pytest.raises(ValueError, match=r"look shifted already: in all 24 .*labels_are_shifted"):
        PackedDataset(shifted, max_seq_len=16)
    packs = PackedDataset(shifted, max_seq_len=16, labels_are_shifted=True)
    assert packs.store.document(1)["labels"].tolist() == [-100] * 3 + whole[1][3:]
    # One target that is not the next token; tokens that are all alike; too few to tell.
    shifted[3]["labels"][4] = 99
    alike = [{"tokens": [7] * 9, "labels": [-100] + [7] * 8}]
    few = [{"tokens": [1, 2, 3, 4], "labels": [2, 3, 4, -100]}]
    for good in (shifted, alike, few):
        PackedDataset(good, max_seq_len=16)


def test_shifted_labels_are_seen_in_one_long_document() -> None:
    tokens = list(range(100_000))
    sample = {"tokens": tokens, "labels": [*tokens[1:], -100]}
    with pytest.raises(ValueError, match="in all 99,999 trained positions"):
        PackedDataset([sample], max_seq_len=2048, overlong="split")


@pytest.mark.parametrize("value", [None, 0, -3, 2.5, True, "8"])
def test_max_seq_len_must_be_a_positive_integer(value: object) -> None:
    with pytest.raises(ValueError, match="max_seq_len is .*set it to the number of tokens"):
        PackedDataset(D([3]), max_seq_len=value)


def test_epochs_have_new_neighbours_and_as_many_packs() -> None:
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 50, 400).tolist()
    ds = P(lens, 64, strategy="best_fit")

    def packs() -> list[tuple[int, ...]]:
        return [tuple(pack["tokens"].tolist()) for pack in ds]

    first = packs()
    ds.set_epoch(1)
    second = packs()
    assert len(first) == len(second) == len(ds)
    assert first != second
    assert ds.epoch == 1
    ds.set_epoch(0)
    assert packs() == first


def test_stats_of_a_document_that_breaks_off_in_the_middle() -> None:
    ds = P([30], 8, True, max_packs=2)
    assert real_seq_lens(ds) == [[8], [8]]
    assert ds.stats.num_trained_tokens == 7 + 7
    assert ds.stats.num_targets_lost_at_cuts == ds.stats.num_cuts == 1
    assert ds.stats.num_unused_tokens == 14


def test_stats_follow_the_epoch() -> None:
    lens = np.random.default_rng(2).integers(1, 50, 200).tolist()
    ds = P(lens, 64, strategy="best_fit", max_packs=5)
    seen = set()
    for epoch in (0, 1, 2):
        ds.set_epoch(epoch)
        assert ds.stats.num_trained_tokens == brute_force_counts(ds)["trained"]
        seen.add(ds.stats.attention_cost)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"strategy": "tetris"}, "strategy"),
        ({"overlong": "shorten"}, "overlong"),
        ({"max_packs": 0}, "max_packs"),
        ({"seed": None}, "seed"),
        ({"num_workers": -1}, "num_workers is -1; set it to a number of processes"),
        ({"cache_key": "k"}, "no cache_dir"),
    ],
)
def test_bad_arguments_are_refused_before_a_sample_is_read(
    argument: dict[str, object], message: str
) -> None:
    class Unread(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            pytest.fail("a sample was read")

    with pytest.raises(ValueError, match=message):
        PackedDataset(Unread([3]), max_seq_len=8, **argument)


def test_persistent_workers_follow_a_new_epoch() -> None:
    ds = P([3, 5, 5, 3, 3, 5] * 20, 8, strategy="best_fit")
    loader = torch.utils.data.DataLoader(
        ds, batch_size=None, num_workers=1, persistent_workers=True
    )
    for epoch in (0, 1, 2):
        ds.set_epoch(epoch)
        assert [pack["tokens"].tolist() for pack in loader] == [p["tokens"].tolist() for p in ds]


def test_a_pickled_data_set_gives_the_same_packs() -> None:
    ds = P([3, 5, 2, 8], 8, strategy="best_fit")
    ds.set_epoch(3)
    copy = pickle.loads(pickle.dumps(ds))
    assert copy.epoch == 3
    for mine, theirs in zip(ds, copy, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_store_can_be_packed_again_without_its_data_set() -> None:
    store = TokenStore.from_samples(D([3, 2, 4]))
    assert len(PackedDataset(store, max_seq_len=9)) == 1
    assert len(PackedDataset(store, max_seq_len=5)) == 2


def brute_force_counts(ds: PackedDataset) -> dict[str, int]:
    """Trained targets, lost ones and attention cost from the packs themselves, in plain Python."""
    trained = cost = packed = 0
    for pack in ds:
        cost += sum(length**2 for length in pack["seq_lens"].tolist())
        trained += sum(label != -100 for label in pack["labels"].tolist())
        packed += len(pack["tokens"])
    return {"trained": trained, "cost": cost, "packed": packed}


@pytest.mark.parametrize("kind", ["plain", "split_across_pack", "split", "truncate", "drop", "max"])
def test_stats_equal_a_count_over_the_packs(kind: str) -> None:
    rng = np.random.default_rng(1)
    samples = []
    for length in rng.integers(0, 40, 120).tolist():
        tokens = rng.integers(0, 1000, length).tolist()
        masked = int(rng.integers(0, length + 1))
        samples.append({"tokens": tokens, "labels": [-100] * masked + tokens[masked:]})
    changes = {
        "plain": {"max_seq_len": 64},
        "split_across_pack": {"max_seq_len": 33, "split_across_pack": True},
        "split": {"max_seq_len": 16, "overlong": "split"},
        "truncate": {"max_seq_len": 16, "overlong": "truncate"},
        "drop": {"max_seq_len": 16, "overlong": "drop"},
        "max": {"max_seq_len": 33, "split_across_pack": True, "max_packs": 20},
    }[kind]
    ds = PackedDataset(samples, **changes)
    stats, counted = ds.stats, brute_force_counts(ds)
    assert stats.num_trained_tokens == counted["trained"]
    assert stats.attention_cost == counted["cost"]
    assert stats.num_packed_tokens == counted["packed"]
    assert stats.num_samples == 120
    assert stats.num_tokens == sum(len(sample["tokens"]) for sample in samples)
    assert stats.num_tokens == (
        stats.num_packed_tokens
        + stats.num_dropped_tokens
        + stats.num_truncated_tokens
        + stats.num_unused_tokens
    )
    spans = [len(pack["seq_lens"]) for pack in ds]
    assert stats.documents_per_pack_min == min(spans)
    assert stats.documents_per_pack_max == max(spans) == ds.max_documents
    assert stats.documents_per_pack_median == np.median(spans)
    assert stats.fill == counted["packed"] / (len(ds) * ds.max_seq_len)
    assert stats.attention_cost_ratio == counted["cost"] / (len(ds) * ds.max_seq_len**2)
    assert stats.as_dict()["num_packs"] == stats["num_packs"] == len(ds)
    assert dict(stats) == stats.as_dict()
