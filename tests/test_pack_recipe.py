"""recipes/pack.py: what it builds, shows, recommends and refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipes import pack as recipe
from tests.helpers import D
from tests.terminal import on_terminal
from tests.tiny import ByteTokenizer, Sums, tiny_config, tiny_lora_model, tiny_model
from torchtune_packing import PackedDataset, plan_packs
from torchtune_packing.cost_model import (
    CostModel,
    Work,
    fit,
    layer_shape,
    measure,
    pack_work,
    padded_work,
)
from torchtune_packing.pack_options import choose, option_lines, pack_options

REPO = Path(__file__).resolve().parent.parent


def test_work_of_packs_and_of_padded_batches_by_hand() -> None:
    plan = plan_packs([4, 2, 6, 3], max_seq_len=6, strategy="sequential")  # [4 2] [6] [3]
    work = pack_work(plan, batch_size=2)
    # two batches: rows of 6 and 6, then one row of 3
    assert work == Work(calls=2, positions=15, pairs=65, dense_pairs=81, documents=4)
    static = pack_work(plan, batch_size=2, static_shapes=True)
    assert (static.positions, static.dense_pairs) == (18, 108)
    # One batch of all four: rows of 6. The order does not matter then.
    padded = padded_work([4, 2, 6, 3], batch_size=4)
    assert padded == Work(calls=1, positions=24, pairs=144, dense_pairs=144, documents=4)
    alone = padded_work([4, 2, 6, 3], batch_size=1)
    assert (alone.calls, alone.positions, alone.pairs) == (4, 15, 65)


def test_the_fit_finds_the_constants_that_made_the_times() -> None:
    layouts = [[512], [128] * 4, [16] * 32, [256], [16] * 16, [128]]
    seconds = [1e-3 + 2e-5 * sum(n) + 3e-8 * sum(k * k for k in n) + 1e-5 * len(n) for n in layouts]
    model = fit(layouts, seconds, "varlen")
    found = (model.per_call, model.per_position, model.per_pair, model.per_document)
    assert found == pytest.approx((1e-3, 2e-5, 3e-8, 1e-5), rel=1e-6)
    assert model.error < 1e-9
    work = Work(calls=2, positions=100, pairs=1000, dense_pairs=5000, documents=3)
    assert model.seconds(work) == pytest.approx(2e-3 + 2e-3 + 3e-5 + 3e-5)


def test_no_constant_is_negative_and_the_error_is_told() -> None:
    layouts = [[64], [16] * 4, [128], [32]]
    model = fit(layouts, [1.0, 0.5, 1.5, 0.7], "sdpa")
    assert min(model.per_call, model.per_position, model.per_pair, model.per_document) >= 0
    assert model.error == max(abs(said / found - 1) for *_, found, said in model.points) > 0.05


def test_the_error_is_that_on_rows_which_the_fit_has_not_seen() -> None:
    """Four constants go through four points exactly, which says nothing of others."""
    layouts = [[64], [16] * 4, [128], [32] * 2]
    model = fit(layouts, [64 + 1e-2, 64 + 4e-2, 128 + 1e-2, 64 + 2e-2], "varlen")
    assert model.error < 1e-6
    tried = model.try_on([[96], [10, 20]], [96 * 2, 30 * 0.8])
    # It says 96.01 of 192 and 30.02 of 24.
    assert [round(said, 2) for *_, said in tried.unseen] == [96.01, 30.02]
    assert tried.error == pytest.approx(1 - 96.01 / 192)
    assert tried.points == model.points


def test_dense_masks_pay_for_every_pair_of_a_row() -> None:
    work = Work(calls=0, positions=0, pairs=10, dense_pairs=1000, documents=0)
    assert CostModel(0, 0, 1, 0, "sdpa").seconds(work) == 1000
    assert CostModel(0, 0, 1, 0, "varlen").seconds(work) == 10


def test_a_layer_of_the_models_width_is_measured() -> None:
    with torch.device("meta"):
        shape = layer_shape(tiny_model())
        lora = layer_shape(
            tiny_lora_model(
                lora_attn_modules=["q_proj"], apply_lora_to_mlp=True, lora_rank=2, lora_alpha=4
            )
        )
    assert (shape.num_layers, shape.embed_dim, shape.intermediate_dim) == (2, 32, 64)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 8)
    assert shape.trains_weights and not lora.trains_weights
    assert lora.intermediate_dim == 64
    model = measure(shape, device="cpu", dtype=torch.float32, max_seq_len=128, budget_s=0.01)
    assert model.backend == "varlen" and len(model.points) == 6
    assert model.points[0][:2] == (128, 1) and model.points[2][:2] == (128, 32)
    assert all(seconds > 0 for *_, seconds, _ in model.points + model.unseen)
    assert [point[:2] for point in model.unseen] == [(128, 5), (96, 4)]


def options(**changes: object) -> list:
    ds = PackedDataset(D([5, 6, 2, 3, 8]), max_seq_len=8, strategy="sequential")
    sizes = changes.pop("sizes", [4, 8, 16])
    return pack_options(ds, sizes, ["best_fit", "sequential"], **changes)


def test_options_are_planned_from_lengths() -> None:
    found = options(packs_per_step=2)
    assert [(o.max_seq_len, o.strategy, o.packs, o.steps_per_epoch) for o in found] == [
        (4, "best_fit", 0, 0),
        (4, "sequential", 0, 0),
        (8, "best_fit", 3, 1),
        (8, "sequential", 4, 2),
        (16, "best_fit", 2, 1),
        (16, "sequential", 2, 1),
    ]
    assert found[0].problem == "3 documents too long"
    assert "2 documents too long" not in found[2].problem
    table = option_lines(found, found[2])
    assert table[3].startswith("> best_fit") and "100.00 %" in table[3]
    assert max(map(len, table)) <= 80


def test_the_least_time_wins_and_among_equals_the_shortest_packs() -> None:
    found = options(cost=CostModel(0, 1, 0, 0, "varlen"), padded_batch_size=5)
    # 24 tokens in rows of real tokens; one padded batch of five rows of 8.
    assert [o.relative_time for o in found[2:]] == pytest.approx([24 / 40] * 4)
    taken, reason = choose(found)
    assert (taken.strategy, taken.max_seq_len) == ("best_fit", 8)
    assert reason.startswith("0.60 of the time of padded batches; of the 4 within 2 %")
    calls = options(cost=CostModel(1, 0, 0, 0, "varlen"), padded_batch_size=1)
    taken, reason = choose(calls)
    assert (taken.strategy, taken.max_seq_len) == ("best_fit", 16)
    # With an error of 50 % in the times, 3 packs are as good as 2.
    assert choose(calls, 0.5)[0].max_seq_len == 8


def test_what_cannot_be_is_not_taken() -> None:
    taken, _ = choose(options(packs_per_step=4))
    assert (taken.strategy, taken.max_seq_len) == ("sequential", 8)
    assert choose(options(packs_per_step=9))[0] is None
    limited = options(model_max_seq_len=7)
    assert {o.problem for o in limited[2:]} == {"the model has 7 positions"}
    ds = PackedDataset(D([2, 2, 9]), max_seq_len=9, overlong="drop")
    [lossy] = pack_options(ds, [4], ["best_fit"])
    assert lossy.problem == "loses 69.2 % of the tokens" and choose([lossy])[0] is None


def run(tmp_path: Path, **changes: object) -> tuple[dict, str]:
    facts, report = recipe.pack(tiny_config(tmp_path, **changes))
    return facts, "\n".join(recipe.plain(report))


def test_the_recipe_shows_the_accounting_options_and_figures(tmp_path: Path) -> None:
    facts, text = run(tmp_path, max_seq_lens=[48, 64])
    ds = PackedDataset(Sums(ByteTokenizer()), max_seq_len=64)
    assert facts["stats"] == ds.stats.as_dict()
    assert facts["packs_per_step"] == 4
    assert [o["packs"] for o in facts["options"]][2] == len(ds)
    assert facts["taken"]["relative_time"] > 0
    assert "documents in" in text and "would take: " in text
    assert max(map(len, text.splitlines())) <= max(80, len(str(tmp_path)) + 40)
    assert (tmp_path / "out" / "packing" / "batch.png").is_file()
    json.dumps(facts)


def test_a_config_without_a_model_or_a_folder_will_do(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, figures_dir=None, strategies="best_fit", world_size=2)
    for key in ("model", "checkpointer", "optimizer", "output_dir"):
        config.pop(key)
    config.metric_logger = None
    facts, report = recipe.pack(config)
    assert facts["cost_model"] is None and "figures" not in facts
    assert 0 < facts["waiting"] < 1 and facts["packs_per_step"] == 8
    assert "2 ranks" in "\n".join(recipe.plain(report))


def test_what_training_would_refuse_is_shown_and_named(tmp_path: Path) -> None:
    changes = {"dataset.max_seq_len": 20, "dataset.overlong": "drop", "predict_time": False}
    facts, text = run(tmp_path, figures_dir=None, **changes)
    assert "training would stop: packing loses" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "max_token_loss" in facts["training_would_stop"]


def test_no_time_is_predicted_for_a_device_that_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts, text = run(tmp_path, device="cuda", figures_dir=None)
    assert facts["cost_model"] is None and facts["taken"] is not None
    assert "no time predicted: this machine has no cuda" in text


def test_bad_configs_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_seq_len=64, dataset={"_component_": "tests.tiny.Sums"})
    config.pop("tokenizer")
    with pytest.raises(ValueError) as refused:
        recipe.pack(config)
    for part in ("unknown key `max_seq_len`", "`tokenizer` is missing", "`dataset` is not packed"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_seq_lens": ["a"]}, ["`max_seq_lens` holds 'a'", "whole number of at least 1"]),
        ({"max_seq_lens": 0}, ["`max_seq_lens` holds 0"]),
        ({"strategies": ["best_fit", "first"]}, ["`strategies` holds 'first'", "sequential"]),
        ({"world_size": 0}, ["`world_size` is 0"]),
        ({"world_size": "two"}, ["`world_size` is 'two'"]),
        ({"padded_batch_size": "x"}, ["`padded_batch_size` is 'x'"]),
        ({"batch_size": 0}, ["`batch_size` is 0"]),
        ({"max_token_loss": 5}, ["`max_token_loss` is 5"]),
        ({"device": "gpu"}, ["`device` is 'gpu'", "cpu or cuda"]),
        ({"dtype": "fp16"}, ["`dtype` is 'fp16'"]),
        ({"packs_per_step": 6, "gradient_accumulation_steps": None, "world_size": 2}, ["is 6"]),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    tmp_path: Path, changes: dict, words: list[str]
) -> None:
    with pytest.raises(ValueError) as refused:
        recipe.pack(tiny_config(tmp_path, **changes))
    assert all(word in str(refused.value) for word in words)


def test_a_batch_size_of_null_is_one_pack(tmp_path: Path) -> None:
    facts, _ = run(tmp_path, batch_size=None, figures_dir=None, predict_time=False)
    assert facts["packs_per_step"] == 2  # gradient_accumulation_steps of the tiny config


def test_rows_are_full_on_any_cuda_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain = recipe.pack_options

    def spied(*args: Any, static_shapes: bool, **keywords: Any) -> Any:
        asked.append(static_shapes)
        return plain(*args, static_shapes=static_shapes, **keywords)

    monkeypatch.setattr(recipe, "pack_options", spied)
    for device in ("cpu", "cuda", "cuda:0"):
        run(tmp_path / device, device=device, figures_dir=None, predict_time=False)
    assert asked == [False, True, True]


@pytest.mark.parametrize("text", ['{"question": "a", "answer": "b"}\n', "{broken\n"])
def test_reading_a_file_says_nothing_but_our_own_sentence(tmp_path: Path, text: str) -> None:
    """`tune` imports `datasets`, with its bars and its log, before a recipe can say a word."""
    (tmp_path / "my.jsonl").write_text(text)
    config = tiny_config(tmp_path)
    config.tokenizer = {"_component_": "tests.test_configs.ChatBytes"}
    config.dataset.source = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "json",
        "data_files": str(tmp_path / "my.jsonl"),
        "column_map": {"input": "question", "output": "answer"},
    }
    OmegaConf.save(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "recipes/pack.py"]
    arguments = ["--config", str(tmp_path / "config.yaml"), "figures_dir=null"]
    home = {"PYTHONPATH": ".", "HF_HOME": str(tmp_path / "home")}
    unset = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "DATASETS_VERBOSITY")
    done = subprocess.run(
        [*command, *arguments, "predict_time=False"],
        cwd=REPO,
        env={key: value for key, value in os.environ.items() if key not in unset} | home,
        capture_output=True,
        text=True,
    )
    if text[1] == "b":
        assert re.fullmatch(r"error: the data file .* is not JSON: line 1 .*\n", done.stderr)
    else:
        assert not done.stderr and done.returncode == 0, done.stdout


def test_json_from_the_command_line_and_a_sharded_build(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **{"dataset.cache_dir": str(tmp_path / "stores")})
    path = tmp_path / "config.yaml"
    OmegaConf.save(config, path)
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "--nproc_per_node", "2"]
    arguments = ["--json", "figures_dir=null", "predict_time=False"]
    done = subprocess.run(
        [*command, "recipes/pack.py", "--config", str(path), *arguments],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # torchtune's launcher announces itself in a line of its own.
    facts = json.loads(done.stdout.splitlines()[-1])
    ds = PackedDataset(Sums(ByteTokenizer()), max_seq_len=64)
    assert facts["stats"]["num_packed_tokens"] == ds.stats.num_packed_tokens
    [store] = [p for p in (tmp_path / "stores").iterdir() if (p / "meta.json").is_file()]
    assert np.load(store / "tokens.npy", mmap_mode="r").tolist() == ds.store.tokens.tolist()


def test_a_terminal_gets_drawn_tables_and_a_file_plain_lines(tmp_path: Path) -> None:
    """The same numbers in both; nothing is wider than 80 columns or cut short."""
    config = tiny_config(tmp_path, max_seq_lens=[20, 64])
    path = tmp_path / "config.yaml"
    OmegaConf.save(config, path)
    code = (
        "import sys; from recipes import pack; sys.argv = ['pack', '--config', sys.argv[1], "
        "'figures_dir=null', 'predict_time=False']; sys.exit(pack.main())"
    )
    shown = on_terminal([sys.executable, "-c", code, str(path)], env={"TERM": "xterm"})
    assert "\x1b[1;32m" in shown.text  # the option to take, in colour
    rows = shown.rows
    assert max(map(len, rows)) <= 80
    assert any(row.count("─") > 40 for row in rows)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "─" not in done.stdout and "\x1b" not in done.stdout
    # Every number of the plain form is on the terminal, and no other.
    first = next(i for i, row in enumerate(rows) if "documents in" in row)  # after a progress bar
    texts = ("\n".join(rows[first:]), done.stdout)
    drawn, plain = (set(re.findall(r"\d[\d,.]*\d|\d", text)) for text in texts)
    assert drawn == plain and "98.04" in plain
