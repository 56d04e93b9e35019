"""TokenBatchSampler: every sample once, no empty rank, equal steps, exact positions."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.helpers import D
from torchtune_packing.collate import collate_flattened
from torchtune_packing.sampler import StepSampler
from torchtune_packing.token_batches import TokenBatchSampler


def epoch_of(world_size: int, *args: object, **kwargs: object) -> list[list[list[int]]]:
    """The batches of each rank."""
    samplers = [
        TokenBatchSampler(*args, rank=rank, world_size=world_size, **kwargs)
        for rank in range(world_size)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(own) for own in batches]
    return batches


def steps_of(batches: list[list[list[int]]], accumulation: int) -> list[Counter]:
    """The samples of each optimizer step over all ranks."""
    return [
        Counter(i for own in batches for batch in own[k : k + accumulation] for i in batch)
        for k in range(0, len(batches[0]), accumulation)
    ]


def test_worked_example_in_data_order() -> None:
    # Next fit: [3 2] [4 1] [1]. The last step lacks a batch, and its only one cannot be cut, so
    # [4 1] gives the 1.
    batches = epoch_of(2, [3, 2, 4, 1, 1], max_tokens=5, shuffle=False)
    assert batches == [[[0, 1], [4]], [[2], [3]]]


def test_heaviest_batches_of_the_last_step_are_cut_first() -> None:
    # Next fit: [2 2 1] [5] | [1 1 1 2], cut into 1 + 2 and 1 + 1 tokens.
    sampler = TokenBatchSampler([2, 2, 1, 5, 1, 1, 1, 2], max_tokens=5, shuffle=False, world_size=2)
    assert sampler.num_packs == 4 and sampler.steps_per_epoch == 2
    assert [sampler.batch(i) for i in range(4)] == [[0, 1, 2], [3], [7, 5], [4, 6]]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    room=st.integers(0, 60),
    world_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_sample_once_in_equal_steps_within_the_budget(
    lengths, room, world_size, accumulation, seed, shuffle
) -> None:
    max_tokens = max(lengths) + room or 1
    build = partial(
        epoch_of,
        world_size,
        lengths,
        max_tokens=max_tokens,
        gradient_accumulation_steps=accumulation,
        seed=seed,
        shuffle=shuffle,
    )
    samples = np.count_nonzero(lengths)
    needed = world_size * accumulation
    if samples < needed or not samples:
        with pytest.raises(ValueError):
            build()
        return
    batches = build()
    assert len({len(own) for own in batches}) == 1
    assert len(batches[0]) % accumulation == 0
    flat = [batch for own in batches for batch in own]
    assert all(1 <= sum(lengths[i] for i in batch) <= max_tokens for batch in flat)
    seen = Counter(i for batch in flat for i in batch)
    assert set(seen.values()) == {1} and all(lengths[i] for i in seen)
    sampler = TokenBatchSampler(
        lengths,
        max_tokens=max_tokens,
        gradient_accumulation_steps=accumulation,
        world_size=world_size,
        seed=seed,
        shuffle=shuffle,
    )
    left_out = [sampler.batch(i) for i in range(len(flat), sampler.num_packs)]
    assert len(left_out) == sampler.num_leftover < needed
    assert len(seen) + sum(map(len, left_out)) == samples
    # Batches are left out only where cutting cannot help: not enough samples for whole steps.
    if left_out:
        assert samples < -(-sampler.num_packs // needed) * needed
    # One plan, at most one step more than its batches fill.
    assert len(flat) // needed == sampler.steps_per_epoch == sampler.num_steps


def test_batches_that_cannot_be_cut_are_left_out_and_counted() -> None:
    sampler = TokenBatchSampler([5] * 5, max_tokens=5, world_size=2)
    assert (sampler.steps_per_epoch, sampler.num_leftover) == (2, 1)
    left_out = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        assert len(sampler) == 2
        left_out |= set(sampler.batch(4))
    assert len(left_out) > 1


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(4, 1, count).astype(np.int64), 1, 1000)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_at_every_step_gives_the_rest_of_the_epoch(accumulation: int) -> None:
    build = partial(
        TokenBatchSampler,
        lognormal(37),
        max_tokens=1000,
        world_size=3,
        rank=1,
        gradient_accumulation_steps=accumulation,
        seed=5,
    )
    whole = build()
    whole.set_epoch(2)
    batches, size = list(whole), whole.packs_per_step
    assert whole.num_packs % size == 0
    for step in range(len(batches) // accumulation + 1):
        resumed = build()
        resumed.set_epoch(2, packs_consumed=step * size)
        assert list(resumed) == batches[step * accumulation :]
        assert resumed.num_steps == len(batches) // accumulation - step


def test_resume_before_a_last_step_that_takes_from_the_step_before() -> None:
    # Four batches of five samples, and a sample alone: it cannot be cut, so the step before gives.
    build = partial(TokenBatchSampler, [1] * 20 + [5], max_tokens=5, world_size=4, shuffle=False)
    for rank in range(4):
        whole = list(build(rank=rank))
        assert len(whole) == 2
        resumed = build(rank=rank)
        resumed.set_epoch(0, packs_consumed=4)
        assert list(resumed) == whole[1:]


def test_resume_on_other_ranks_does_not_cut_what_was_trained_on() -> None:
    # Batches [0 1] [2] [3] [4], of which one rank took the first: only that one could be cut.
    build = partial(TokenBatchSampler, [5, 5, 10, 10, 10], max_tokens=10, shuffle=False)
    rest = []
    for rank in range(2):
        sampler = build(world_size=2, rank=rank)
        sampler.set_epoch(0, packs_consumed=1)
        assert (sampler.num_steps, sampler.num_leftover) == (1, 1)
        rest += list(sampler)
    assert rest == [[2], [3]]


def test_the_heaviest_batch_is_cut_to_fill_the_last_step() -> None:
    # Batches of 4, 9 and 9 tokens: [0 1] [2 3] [4]; the last one cannot be cut.
    lengths = [2, 2, 7, 2, 9]
    ranks = epoch_of(4, lengths, max_tokens=10, shuffle=False)
    assert ranks == [[[0, 1]], [[2]], [[4]], [[3]]]


def test_resume_on_another_number_of_ranks_goes_through_the_same_batches() -> None:
    lengths = lognormal(400)
    four = [
        TokenBatchSampler(lengths, max_tokens=1500, world_size=4, rank=rank) for rank in range(4)
    ]
    one = TokenBatchSampler(lengths, max_tokens=1500)
    steps = len(four[0]) - 1
    first = [sorted(i for own in four for i in list(own)[k]) for k in range(steps)]
    assert first == [
        sorted(i for b in range(4 * k, 4 * k + 4) for i in one.batch(b)) for k in range(steps)
    ]
    # Goes on with 3 ranks after 2 steps of 4: every sample of the rest once.
    rest = []
    for rank in range(3):
        sampler = TokenBatchSampler(lengths, max_tokens=1500, world_size=3, rank=rank)
        sampler.set_epoch(0, packs_consumed=8)
        rest += [i for batch in sampler for i in batch]
    assert Counter(rest + [i for k in first[:2] for i in k]) == Counter(range(400))


def test_a_position_past_the_end_has_nothing_left() -> None:
    # 10 batches made 12 on 4 ranks; on one rank the epoch has 10.
    sampler = TokenBatchSampler([5] * 20, max_tokens=10)
    assert sampler.num_packs == 10
    sampler.set_epoch(0, packs_consumed=12)
    assert (len(sampler), list(sampler), sampler.num_packs) == (0, [], 12)


def test_epochs_and_seeds_differ_and_a_run_repeats() -> None:
    lengths = lognormal(300)
    build = partial(TokenBatchSampler, lengths, max_tokens=2000)
    first, same, other = build(seed=1), build(seed=1), build(seed=2)
    assert list(first) == list(same) != list(other)
    assert first.checksum() == same.checksum() != other.checksum()
    epoch_0, batches = list(first), first.num_packs
    first.set_epoch(1)
    assert list(first) != epoch_0 and first.num_packs == batches
    first.set_epoch(0)
    assert list(first) == epoch_0
    ordered = build(shuffle=False)
    assert [i for batch in ordered for i in batch] == list(range(300))


def test_balance_moves_batches_between_ranks_and_no_sample_between_steps() -> None:
    lengths = lognormal(500)
    build = partial(
        epoch_of, 4, lengths, max_tokens=1500, gradient_accumulation_steps=2, shuffle=True
    )
    plain, balanced = build(balance=False), build(balance=True)
    assert plain != balanced
    assert steps_of(plain, 2) == steps_of(balanced, 2)

    def waiting(batches: list[list[list[int]]]) -> int:
        costs = np.array([[(lengths[batch] ** 2).sum() for batch in own] for own in batches])
        return int((costs.max(0) - costs).sum())

    assert waiting(balanced) < 0.7 * waiting(plain)


def test_batches_are_nearly_full() -> None:
    lengths = lognormal(2000)
    sampler = TokenBatchSampler(lengths, max_tokens=4096)
    assert lengths.sum() / (sampler.num_packs * 4096) > 0.99


def test_stands_in_for_the_step_sampler() -> None:
    packs = StepSampler(6, batch_size=1, world_size=2)
    tokens = TokenBatchSampler([5] * 6, max_tokens=5, world_size=2)
    for name in ("packs_per_step", "steps_per_epoch", "num_leftover", "num_steps", "num_packs"):
        assert getattr(tokens, name) == getattr(packs, name), name
    packs.set_epoch(1, packs_consumed=2, costs=np.ones(6))
    tokens.set_epoch(1, packs_consumed=2, costs=np.ones(6))
    for name in ("epoch", "packs_consumed", "num_steps"):
        assert getattr(tokens, name) == getattr(packs, name), name
    assert len(tokens) == len(packs)
    assert sorted(tokens.order()) == sorted(packs.order())


def test_loader_makes_rows_within_the_budget_with_every_token_once() -> None:
    lens = [3, 9, 1, 4, 7, 2, 8, 5]
    sampler = TokenBatchSampler(lens, max_tokens=12)
    loader = DataLoader(
        D(lens), batch_sampler=sampler, collate_fn=partial(collate_flattened, mask=None)
    )
    rows = [batch["tokens"] for batch in loader]
    assert all(row.shape[0] == 1 and row.shape[1] <= 12 for row in rows)
    tokens = [t for i, n in enumerate(lens, 1) for t in range(100 * i, 100 * i + n)]
    assert sorted(torch.cat(rows, 1)[0].tolist()) == tokens


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 9], {"max_tokens": 8}, r"sample 1 is too long .*9 > 8.*max_tokens"),
        ([3, 9], {"max_tokens": 0}, "max_tokens is 0"),
        ([3, 9], {"max_tokens": None}, "max_tokens is None"),
        ([3, 0, 9], {"max_tokens": 9, "world_size": 3}, r"2 samples, .* needs 3 batches"),
        (
            [3] * 7,
            {"max_tokens": 9, "world_size": 4, "gradient_accumulation_steps": 2},
            r"7 samples, .* needs 8 batches \(gradient_accumulation_steps 2 x world_size 4\)",
        ),
        ([3], {"max_tokens": 9, "rank": 1}, "rank is 1, but with world_size=1"),
        ([3], {"max_tokens": 9, "seed": None}, "seed is None"),
        ([3], {"max_tokens": 9, "world_size": 0}, "world_size is 0"),
        ([3.5], {"max_tokens": 9}, r"shape \(1,\) and the type float64"),
        ([-1, 2], {"max_tokens": 9}, "0 or more"),
        ([[3]], {"max_tokens": 9}, r"shape \(1, 1\)"),
        ([], {"max_tokens": 9}, "0 samples"),
        ([0, 0], {"max_tokens": 9}, "0 samples"),
    ],
)
def test_bad_input_is_named(lengths, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatchSampler(lengths, **options)


def test_batches_of_like_squared_lengths_meet_in_a_micro_step() -> None:
    """Squares 75, 66, 64, 100 pair the last with the first; cubes or sums would pair others."""
    lengths = [5, 5, 5, 5, 5, 4, 8, 10]
    arguments = {"gradient_accumulation_steps": 2, "world_size": 2, "balance": True}
    ranks = [
        list(TokenBatchSampler(lengths, max_tokens=15, rank=rank, shuffle=False, **arguments))
        for rank in (0, 1)
    ]
    micro_steps = {frozenset(map(tuple, pair)) for pair in zip(*ranks, strict=True)}
    assert micro_steps == {
        frozenset({(0, 1, 2), (7,)}),
        frozenset({(3, 4, 5), (6,)}),
    }
