"""The accounting of a run: every number against one worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from recipes.full_finetune import FullFinetuneRecipe
from tests.helpers import D
from tests.tiny import tiny_config
from torchtune_packing import PackedDataset
from torchtune_packing.accounting import (
    accounting_lines,
    accounting_table,
    check_token_loss,
    effective_batch,
    waiting,
)

SAMPLES = [
    {"tokens": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]},
    {"tokens": [], "labels": []},
    {"tokens": [5, 6], "labels": [-100, -100]},
    {"tokens": list(range(10)), "labels": list(range(10))},
    {"tokens": [7, 8, 9], "labels": [7, 8, 9]},
]


def P(lens: list[int], max_seq_len: int, split: bool = False) -> PackedDataset:
    return PackedDataset(
        D(lens), max_seq_len=max_seq_len, split_across_pack=split, strategy="sequential"
    )


def table(**changes: object) -> dict[str, tuple[int, int]]:
    ds = PackedDataset(SAMPLES, max_seq_len=6, **changes)
    return {name.strip(): (documents, tokens) for name, documents, tokens in accounting_table(ds)}


def test_dropped_documents_and_tokens() -> None:
    assert table(overlong="drop") == {
        "documents in": (5, 19),
        "packed": (3, 9),
        "of them split over packs": (0, 0),
        "without a trained token": (1, 2),
        "truncated (tokens cut off)": (0, 0),
        "dropped": (1, 10),
        "empty": (1, 0),
    }


def test_truncated_tokens_are_those_cut_off() -> None:
    found = table(overlong="truncate")
    assert found["packed"] == (4, 15)
    assert found["truncated (tokens cut off)"] == (1, 4)


def test_split_documents_count_once_with_all_their_tokens() -> None:
    found = table(overlong="split")
    assert found["packed"] == (4, 19)
    assert found["of them split over packs"] == (1, 10)


def test_left_out_by_max_packs_shows_only_when_asked_for() -> None:
    found = table(overlong="drop", max_packs=1, strategy="sequential")
    assert found["packed"] == (2, 6) and found["left out by max_packs"] == (1, 3)


def test_waiting_is_what_the_slowest_rank_makes_others_wait() -> None:
    # In data order: micro-steps (9, 1) and (8, 2). Slowest: 9 + 8 = 17; mean: 5 + 5 = 10.
    costs = np.array([9, 1, 8, 2])
    common = {"batch_size": 1, "gradient_accumulation_steps": 2, "world_size": 2}
    assert waiting(costs, shuffle=False, **common) == pytest.approx(1 - 10 / 17)
    # Dealt by cost: (9, 8) and (2, 1). Slowest: 9 + 2 = 11.
    assert waiting(costs, **common) == pytest.approx(1 - 10 / 11)
    assert waiting(costs, batch_size=1, world_size=1) == 0
    assert waiting(costs, batch_size=3, world_size=2) == 0
    assert waiting(np.full(8, 7), batch_size=1, world_size=4) == 0


def test_effective_batch_is_the_mean_over_the_packs() -> None:
    ds = P([4, 2, 6, 3], 6)  # [4 2] [6] [3]: 15 tokens, 11 of them targets
    assert effective_batch(ds, 2) == pytest.approx(
        {"documents": 4 * 2 / 3, "tokens": 15 * 2 / 3, "trained_tokens": 11 * 2 / 3}
    )


def test_lines_say_what_there_is_in_80_columns() -> None:
    ds = P([4, 2, 6, 3], 6)
    text = "\n".join(accounting_lines(ds, world_size=2, packs_per_step=2, shuffle=False))
    assert "packs: 3 of 6 tokens, fill 83.33 % (15/18)" in text
    assert "documents per pack: 1 to 2, median 1; trained tokens: 73.3 %" in text
    # 16 + 4 + 36 + 9 pairs of 3 * 36
    assert "attention: 60.2 % of what full causal rows would cost" in text
    # one step of packs [4 2] and [6]: costs 20 and 36
    assert "2 ranks: 22.2 % of their attention time is waiting" in text
    assert "2 packs, on average 2.7 documents and 10 tokens,\n    of which 7 are trained" in text
    big = PackedDataset(SAMPLES, max_seq_len=6, overlong="split")
    big_lines = accounting_lines(big, world_size=128, packs_per_step=4096)
    assert max(map(len, [*text.splitlines(), *big_lines])) <= 80
    assert "cuts: 1, which cost 1 targets" in "\n".join(big_lines)


def test_loss_of_tokens_stops_with_the_options() -> None:
    dropped = PackedDataset(SAMPLES, max_seq_len=6, overlong="drop")
    with pytest.raises(ValueError, match=r"loses 52.63 % of the tokens \(10 dropped of 19\)") as e:
        check_token_loss(dropped)
    for option in (
        "raise max_seq_len",
        "has 10 tokens",
        "overlong to split",
        "max_token_loss=0.53",
    ):
        assert option in str(e.value)
    check_token_loss(dropped, 0.53)
    truncated = PackedDataset(SAMPLES, max_seq_len=6, overlong="truncate")
    with pytest.raises(ValueError, match="4 truncated"):
        check_token_loss(truncated, 0.2)
    check_token_loss(truncated, 4 / 19)


def test_cuts_lose_targets_and_can_stop_a_run() -> None:
    ds = P([4, 8], 6, True)  # one cut, one target, 12 tokens
    with pytest.raises(ValueError, match=r"8.33 %.*1 targets at cuts.*leave out split_across_pack"):
        check_token_loss(ds, 0.08)
    check_token_loss(ds, 0.09)
    check_token_loss(P([4, 2], 6))


def test_max_packs_is_no_loss() -> None:
    check_token_loss(PackedDataset(SAMPLES[:1] * 9, max_seq_len=6, max_packs=1), 0.0)


def test_recipes_print_the_block_and_refuse_losses_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, max_steps_per_epoch=1, epochs=1)
    recipe = FullFinetuneRecipe(config)
    recipe.setup()
    recipe.cleanup()
    printed = capsys.readouterr().out
    assert "documents in" in printed and "effective batch: 4 packs" in printed

    lossy = {"dataset.max_seq_len": 20, "dataset.overlong": "drop"}
    config = tiny_config(tmp_path, output_dir=str(tmp_path / "b"), **lossy)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"no weights")
    recipe = FullFinetuneRecipe(config)
    with pytest.raises(ValueError, match="more than max_token_loss=0.01 allows"):
        recipe.setup()
    with pytest.raises(ValueError, match="`max_token_loss` is 2; it must be a share"):
        FullFinetuneRecipe(tiny_config(tmp_path, max_token_loss=2))
