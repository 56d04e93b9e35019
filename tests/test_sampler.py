"""StepSampler: order, shares of ranks, balance, resume at every position."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from torchtune_packing import plan_packs
from torchtune_packing.sampler import StepSampler, balanced_shares, epoch_order


def ranks_of(num_packs: int, world_size: int, **kwargs: object) -> list[StepSampler]:
    """The samplers of all ranks."""
    return [
        StepSampler(num_packs, rank=rank, world_size=world_size, **kwargs)
        for rank in range(world_size)
    ]


def steps_of(samplers: list[StepSampler]) -> list[list[int]]:
    """The packs of each step on all ranks together, sorted."""
    accumulation = samplers[0].gradient_accumulation_steps
    rows = [list(sampler) for sampler in samplers]
    assert len({len(row) for row in rows}) == 1
    return [
        sorted(
            pack
            for row in rows
            for micro_batch in row[start : start + accumulation]
            for pack in micro_batch
        )
        for start in range(0, len(rows[0]), accumulation)
    ]


def test_unshuffled_shares_by_hand() -> None:
    first, second = ranks_of(
        9, 2, batch_size=1, gradient_accumulation_steps=2, shuffle=False, costs=range(9)
    )
    assert list(first) == [[0], [2], [4], [6]]
    assert list(second) == [[1], [3], [5], [7]]
    assert (first.packs_per_step, first.steps_per_epoch, first.num_leftover) == (4, 2, 1)
    assert len(first) == 4


def test_a_data_loader_takes_it_as_a_batch_sampler() -> None:
    sampler = StepSampler(10, batch_size=2, seed=3)
    loader = DataLoader(torch.arange(10), batch_sampler=sampler)
    assert len(loader) == 5
    assert [batch.tolist() for batch in loader] == list(sampler)


def test_epoch_order_is_a_permutation_drawn_by_seed_and_epoch() -> None:
    drawn = {
        (seed, epoch): tuple(epoch_order(50, seed=seed, epoch=epoch).tolist())
        for seed in (0, 1, 2**32, 2**40)
        for epoch in (0, 1, 2)
    }
    assert len(set(drawn.values())) == len(drawn)
    assert all(sorted(order) == list(range(50)) for order in drawn.values())
    assert epoch_order(5, seed=1, epoch=1, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    # The order is a promise to every resumed run: a change here breaks their positions.
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 6, 2, 4, 7, 0, 5, 1]


def test_epoch_order_favours_no_place() -> None:
    orders = np.stack([epoch_order(8, seed=0, epoch=epoch) for epoch in range(4000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=8) for place in range(8)])
    # 500 expected, standard deviation 21.
    assert abs(counts - 500).max() < 5 * 21


def test_B18_fewer_packs_than_a_step_needs() -> None:
    for batch_size, accumulation, world_size in ((5, 1, 1), (1, 4, 1), (2, 1, 4)):
        needed = batch_size * accumulation * world_size
        with pytest.raises(
            ValueError,
            match=rf"has 3 packs, but one optimizer step needs {needed} "
            rf"\(batch_size {batch_size} x gradient_accumulation_steps {accumulation} "
            rf"x world_size {world_size}\)",
        ):
            StepSampler(
                3,
                batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                world_size=world_size,
            )
    assert StepSampler(3, batch_size=3).steps_per_epoch == 1


def test_B19_ten_packs_two_epochs_stopped_after_step_three() -> None:
    sampler = StepSampler(10, batch_size=2, seed=5)
    run = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        run += list(sampler)
    assert len(run) == 10
    resumed = StepSampler(10, batch_size=2, seed=5)
    resumed.set_epoch(0, packs_consumed=6)
    rest = list(resumed)
    resumed.set_epoch(1)
    assert rest + list(resumed) == run[3:]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_B19_resume_at_every_position_gives_the_rest(
    accumulation: int, world_size: int, shuffle: bool
) -> None:
    costs = np.arange(25) ** 2
    kwargs = {
        "batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        "world_size": world_size,
        "rank": world_size - 1,
        "seed": 7,
        "shuffle": shuffle,
        "costs": costs,
    }
    for epoch in (0, 3):
        whole = StepSampler(25, **kwargs)
        whole.set_epoch(epoch)
        batches = list(whole)
        assert len(batches) == len(whole) == whole.steps_per_epoch * accumulation
        for step in range(whole.steps_per_epoch + 1):
            resumed = StepSampler(25, **kwargs)
            resumed.set_epoch(epoch, packs_consumed=step * whole.packs_per_step)
            assert list(resumed) == batches[step * accumulation :]
            assert resumed.num_leftover == whole.num_leftover


def test_resume_on_another_number_of_ranks_goes_on_in_the_same_order() -> None:
    num_packs, costs = 100, np.random.default_rng(0).integers(1, 1000, 100)
    order = epoch_order(num_packs, seed=4, epoch=2).tolist()
    layouts = [(1, 1, 1), (4, 1, 2), (2, 3, 2), (8, 2, 1), (3, 1, 5)]
    for before, after in itertools.permutations(layouts, 2):
        consumed = 0
        for (world_size, accumulation, batch_size), num_steps in ((before, 2), (after, 99)):
            samplers = ranks_of(
                num_packs,
                world_size,
                batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                seed=4,
                costs=costs,
            )
            for sampler in samplers:
                sampler.set_epoch(2, packs_consumed=consumed)
            size = samplers[0].packs_per_step
            steps = steps_of(samplers)
            assert len(steps) == (num_packs - consumed) // size == samplers[0].num_steps
            for step in steps[:num_steps]:
                assert step == sorted(order[consumed : consumed + size])
                consumed += size
        assert consumed + samplers[0].num_leftover == num_packs


def test_B21_steps_are_counted_in_packs() -> None:
    plan = plan_packs([100] * 52, max_seq_len=1000)
    sampler = StepSampler(len(plan), batch_size=1, gradient_accumulation_steps=2)
    assert (len(plan), sampler.steps_per_epoch, 3 * sampler.steps_per_epoch) == (6, 3, 9)
    assert len(sampler) == 6


def test_B23_orders_differ_between_seeds_and_epochs_and_ranks_share_them() -> None:
    def run(seed: int, epoch: int) -> list[list[list[int]]]:
        samplers = ranks_of(12, 2, batch_size=2, seed=seed)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [list(sampler) for sampler in samplers]

    runs = [run(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(runs, 2))
    for first, second in runs:
        packs = [pack for row in (first, second) for batch in row for pack in batch]
        assert sorted(packs) == list(range(12))


def test_B23_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed is None, .* broadcast it"):
        StepSampler(12, batch_size=2, seed=None, world_size=2)


def test_B28_seven_packs_on_two_ranks() -> None:
    samplers = ranks_of(7, 2, batch_size=2, seed=1)
    assert [len(list(sampler)) for sampler in samplers] == [1, 1]
    assert {sampler.steps_per_epoch for sampler in samplers} == {1}
    assert {sampler.num_leftover for sampler in samplers} == {3}
    left_out = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        (trained,) = steps_of(samplers)
        left_out.append(frozenset(range(7)) - frozenset(trained))
    assert len(set(left_out)) == 3


def test_B28_packs_are_made_before_they_are_dealt() -> None:
    # Packed on their own, rank 0 would have 4 packs of [8] and rank 1 a single one of [1] * 4.
    plan = plan_packs([8] * 4 + [1] * 4, max_seq_len=8)
    assert len(plan) == 5
    assert [len(sampler) for sampler in ranks_of(len(plan), 2, batch_size=1)] == [2, 2]


def test_B30_ranks_have_disjoint_packs_that_cover_all_and_a_checksum_to_compare() -> None:
    costs = np.arange(40)
    samplers = ranks_of(40, 2, batch_size=2, gradient_accumulation_steps=2, seed=9, costs=costs)
    packs = [pack for sampler in samplers for batch in sampler for pack in batch]
    assert sorted(packs) == list(range(40))
    assert samplers[0].checksum() == samplers[1].checksum()

    def checksum(num_packs: int = 40, packs_consumed: int = 0, **kwargs: object) -> int:
        common = {"batch_size": 2, "world_size": 2, "seed": 9, "costs": costs} | kwargs
        sampler = StepSampler(num_packs, **common)
        sampler.set_epoch(0, packs_consumed=packs_consumed)
        return sampler.checksum()

    others = [
        checksum(),
        checksum(seed=10),
        checksum(num_packs=41, costs=np.arange(41)),
        checksum(costs=costs[::-1]),
        checksum(balance=False),
        checksum(shuffle=False),
        checksum(batch_size=1),
        checksum(gradient_accumulation_steps=2),
        checksum(packs_consumed=8),
    ]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(("world_size", "accumulation", "batch_size"), [(2, 3, 2), (4, 1, 3)])
def test_balance_keeps_the_packs_of_every_step(
    world_size: int, accumulation: int, batch_size: int
) -> None:
    num_packs = 60
    costs = np.random.default_rng(1).integers(1, 10**6, num_packs)
    common = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "seed": 2}
    plain = ranks_of(num_packs, world_size, balance=False, costs=costs, **common)
    balanced = ranks_of(num_packs, world_size, costs=costs, **common)
    assert steps_of(plain) == steps_of(balanced)
    assert [list(sampler) for sampler in plain] != [list(sampler) for sampler in balanced]
    order = epoch_order(num_packs, seed=2, epoch=0).reshape(
        -1, accumulation, world_size, batch_size
    )
    for rank, sampler in enumerate(plain):
        assert list(sampler) == order[:, :, rank].reshape(-1, batch_size).tolist()


def test_balance_follows_shuffle_and_needs_costs() -> None:
    costs = [9, 1, 8, 2]
    common = {"batch_size": 1, "gradient_accumulation_steps": 2, "world_size": 2}
    assert list(StepSampler(4, shuffle=False, costs=costs, **common)) == [[0], [2]]
    assert list(StepSampler(4, shuffle=False, balance=True, costs=costs, **common)) == [[0], [1]]
    assert list(StepSampler(4, shuffle=False, balance=True, **common)) == [[0], [2]]


def shares_of(costs: list[float], **kwargs: int) -> list[list[list[float]]]:
    """Costs instead of positions, ``[accumulation][rank][row]``."""
    array = np.array([costs])
    return array[0][balanced_shares(array, **kwargs)[0]].tolist()


def test_balanced_shares_by_hand() -> None:
    assert shares_of([9, 1, 8, 2], batch_size=1, accumulation=2, world_size=2) == [
        [[9], [8]],
        [[1], [2]],
    ]
    # Sums 10 and 10 out of 9 + 1 and 8 + 2; in turn it would be 9 + 8 and 1 + 2.
    assert shares_of([9, 8, 1, 2], batch_size=2, accumulation=1, world_size=2) == [
        [[9, 1], [8, 2]],
    ]


def test_balanced_shares_treat_many_steps_as_one_at_a_time() -> None:
    costs = np.random.default_rng(3).integers(1, 100, (7, 24))
    sizes = {"batch_size": 3, "accumulation": 2, "world_size": 4}
    together = balanced_shares(costs, **sizes)
    assert together.shape == (7, 2, 4, 3)
    assert (np.sort(together.reshape(7, 24)) == np.arange(24)).all()
    for step in range(7):
        assert (balanced_shares(costs[step : step + 1], **sizes)[0] == together[step]).all()


def test_balanced_micro_steps_wait_as_little_as_any_grouping_could() -> None:
    costs = [int(c) for c in np.random.default_rng(4).integers(1, 100, 6)]
    shares = shares_of(costs, batch_size=1, accumulation=3, world_size=2)
    found = sum(max(rank[0] for rank in micro) for micro in shares)
    best = min(
        sum(max(order[i : i + 2]) for i in range(0, 6, 2))
        for order in itertools.permutations(costs)
    )
    assert found == best


def test_a_sampler_travels_to_another_process() -> None:
    sampler = StepSampler(20, batch_size=2, seed=3, costs=np.arange(20))
    sampler.set_epoch(1, packs_consumed=4)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


def test_costs_of_another_epoch_replace_the_old_ones() -> None:
    sampler = StepSampler(4, batch_size=1, world_size=2, gradient_accumulation_steps=2)
    sampler.set_epoch(0, costs=np.array([1, 2, 3, 4], dtype=np.uint8))
    assert list(sampler) == [[3], [0]]
    sampler.set_epoch(0, costs=[4.0, 3.0, 2.0, 1.0])
    assert list(sampler) == [[0], [3]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; set it to 1 or more"),
        ({"batch_size": 1.5}, r"batch_size is 1\.5"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"world_size": -1}, "world_size is -1"),
        ({"world_size": 2, "rank": 2}, r"rank is 2, .* from 0 to 1"),
        ({"rank": -1}, "rank is -1"),
        ({"seed": -3}, "seed is -3"),
        ({"costs": [1, 2]}, r"costs has the shape \(2,\) .* each of the 12 packs"),
        ({"costs": [float("nan")] * 12}, "costs holds negative or non-finite"),
        ({"costs": [-1] * 12}, "costs holds negative or non-finite"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepSampler(12, **({"batch_size": 1} | arguments))


def test_positions_out_of_range_are_refused() -> None:
    sampler = StepSampler(12, batch_size=2)
    with pytest.raises(ValueError, match=r"packs_consumed is 13, but the epoch has 12 packs"):
        sampler.set_epoch(0, packs_consumed=13)
    with pytest.raises(ValueError, match="epoch is -1"):
        sampler.set_epoch(-1)
    sampler.set_epoch(0, packs_consumed=12)
    assert list(sampler) == [] and len(sampler) == 0
