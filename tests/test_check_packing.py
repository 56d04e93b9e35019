"""``recipes/check_packing.py``: it passes what is right and names each fault that is put in."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.modules import MultiHeadAttention

from recipes import check_packing
from recipes.check_packing import CheckPackingRecipe
from tests.conftest import REPO
from tests.tiny import tiny_config
from tests.tiny_models import one_thread
from torchtune_packing.masks import block_causal_mask
from torchtune_packing.training import loading


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


LORA = {
    "_component_": "tests.tiny.tiny_lora_model",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
}
ALL_TRAINED = {
    "dataset.source": {"_component_": "tests.tiny.Hundreds", "num_samples": 12, "length": 18}
}


def config_of(folder: Path, **changes: Any) -> DictConfig:
    """As ``tiny_config``, but ``dataset`` replaces the whole node."""
    dataset = changes.pop("dataset", None)
    cfg = tiny_config(folder, **changes)
    if dataset is not None:
        cfg.dataset = dataset
    return cfg


def check(cfg: DictConfig, *, draw: bool = False) -> tuple[int, set[str], CheckPackingRecipe]:
    """Runs the recipe in this process: exit code, names of the lines that failed, recipe."""
    recipe = CheckPackingRecipe(cfg)
    recipe.setup()
    lines = recipe.check()
    if not draw:
        recipe.pattern = None
    return recipe.report(lines), {line.name for line in lines if not line.passed}, recipe


@pytest.mark.filterwarnings("ignore:.*Cannot dispatch to fused implementation")
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_backend": "varlen"},
        {"attention_backend": "sdpa", "batch_size": 3, "check_packs": 3},
        {"dtype": "bf16"},
        {"loss_reduction": "document", "enable_activation_checkpointing": True},
        {"model": LORA},
        {"dataset": {"_component_": "tests.tiny.Sums"}, "batch_size": 4}
        | {"collate_fn": "torchtune_packing.collate_flattened"},
    ],
    ids=["varlen", "sdpa", "bf16", "document", "lora", "padding-free"],
)
def test_what_is_right_passes(tmp_path: Path, changes: dict[str, Any], capsys: Any) -> None:
    code, failed, recipe = check(config_of(tmp_path, **changes), draw=True)
    printed = capsys.readouterr().out
    assert (code, failed) == (0, set()), printed
    assert (recipe.output / "check_packing.png").stat().st_size > 5_000
    assert (recipe.output / "check_packing.txt").read_text() in printed
    table = printed.split("figure:")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_a_stock_config_needs_only_our_data_set(tmp_path: Path, monkeypatch: Any) -> None:
    """The keys of torchtune's own configs, unknown to our recipes; the exit code of the command."""
    ours = OmegaConf.to_container(tiny_config(tmp_path))
    kept = ("output_dir", "tokenizer", "dataset", "model", "checkpointer", "device", "dtype")
    stock = {key: ours[key] for key in kept} | {
        "seed": None,
        "shuffle": True,
        "packed": False,
        "resume_from_checkpoint": False,
        "batch_size": 2,
        "epochs": 1,
        "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW", "lr": 2e-5},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": None,
        "compile": False,
        "optimizer_in_bwd": True,
        "enable_activation_checkpointing": True,
        "enable_activation_offloading": False,
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger"},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
    }
    stock["checkpointer"]["recipe_checkpoint"] = None
    path = tmp_path / "stock.yaml"
    OmegaConf.save(OmegaConf.create(stock), path)
    monkeypatch.setattr(sys, "argv", ["check_packing.py", "--config", str(path)])
    with pytest.raises(SystemExit) as stopped:
        check_packing.main()
    assert stopped.value.code == 0
    with pytest.raises(SystemExit) as stopped:
        sys.argv.append("model.max_seq_len=8")
        check_packing.main()
    assert stopped.value.code == 1


@pytest.mark.parametrize(
    ("component", "code"),
    [
        ("torchtune_packing.datasets.packed_dataset", 0),
        ("tests.tiny_models.packs_of_one_document", 1),
    ],
    ids=["right", "positions that run on"],
)
def test_the_command_of_the_docs_exits_with_0_or_1(
    tmp_path: Path, component: str, code: int
) -> None:
    """``PYTHONPATH=. tune run recipes/check_packing.py --config ...`` as a process of its own."""
    path = tmp_path / "run.yaml"
    OmegaConf.save(config_of(tmp_path, **{"dataset._component_": component}), path)
    done = subprocess.run(
        [sys.executable, "-m", "torchtune._cli.tune", "run", "recipes/check_packing.py"]
        + ["--config", str(path), "check_packs=1"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    failed = {
        line.split("  ")[0] for line in done.stdout.splitlines() if line.rstrip().endswith("FAIL")
    }
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert failed >= {"documents as stored", "positions restart", "leak into other documents"}
    else:
        assert not failed and "All 12 checks passed" in done.stdout


def installed_with(monkeypatch: Any, change: Callable[[Any, Any], None]) -> None:
    """Lets ``change(model, attention)`` spoil the attention after it has been installed."""
    install = check_packing.install_attention

    def spoiled(model: Any, *args: Any, **kwargs: Any) -> Any:
        attention = install(model, *args, **kwargs)
        change(model, attention)
        return attention

    monkeypatch.setattr(check_packing, "install_attention", spoiled)


def mask_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], None]:
    """A mask that is made for other lengths than those of the batch."""

    def spoil(model: Any, attention: Any) -> None:
        prepare = attention.prepare
        attention.prepare = lambda seq_lens, s, real_lengths=None: prepare(change(seq_lens), s)

    return spoil


def one_document(seq_lens: torch.Tensor) -> torch.Tensor:
    return seq_lens.sum(dim=1, keepdim=True, dtype=torch.int32)


def moved_by(step: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(seq_lens: torch.Tensor) -> torch.Tensor:
        changed = seq_lens.clone()
        changed[:, 0] += step
        changed[:, 1] -= step
        return changed

    return change


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_B10_plain_causal_attention_is_caught(tmp_path: Path, backend: str, monkeypatch) -> None:
    installed_with(monkeypatch, mask_of(one_document))
    code, failed, _ = check(config_of(tmp_path, attention_backend=backend))
    assert code == 1
    assert failed == {
        "logits, packed - alone",
        "same document, two places",
        "loss, relative",
        "gradients, relative",
        "gradient norm, relative",
        "leak into other documents",
        "attention pattern",
    }


@pytest.mark.parametrize(("backend", "step"), [("varlen", 1), ("varlen", -1), ("sdpa", -1)])
def test_a_mask_one_position_off_is_caught(
    tmp_path: Path, backend: str, step: int, monkeypatch: Any
) -> None:
    installed_with(monkeypatch, mask_of(moved_by(step)))
    code, failed, _ = check(config_of(tmp_path, attention_backend=backend))
    assert code == 1
    assert failed >= {"logits, packed - alone", "gradients, relative", "attention pattern"}


def collated_with(monkeypatch: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Lets ``change(batch)`` spoil every batch of packs."""
    collate = loading.collate_packed

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        batch = collate(*args, **kwargs)
        change(batch)
        return batch

    monkeypatch.setattr(loading, "collate_packed", spoiled)


def test_positions_that_do_not_restart_are_caught(tmp_path: Path, monkeypatch: Any) -> None:
    """Rotary embeddings are relative: logits hardly show it, so the positions themselves must."""

    def run_on(batch: dict[str, Any]) -> None:
        batch["input_pos"] = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])

    collated_with(monkeypatch, run_on)
    code, failed, _ = check(config_of(tmp_path))
    assert code == 1
    assert "positions restart" in failed


def test_B1_a_label_shifted_across_a_boundary_is_caught(tmp_path: Path, monkeypatch: Any) -> None:
    def shift_the_whole_pack(batch: dict[str, Any]) -> None:
        batch["labels"][:, :-1] = batch["tokens"][:, 1:]

    collated_with(monkeypatch, shift_the_whole_pack)
    code, failed, _ = check(config_of(tmp_path, **ALL_TRAINED))
    assert code == 1
    lines = {"boundary targets", "loss, relative", "gradients, relative"}
    assert lines <= failed <= lines | {"gradient norm, relative"}


def test_a_layer_that_ignores_the_mask_is_caught_and_named(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def spoil(model: Any, attention: Any) -> None:
        layer = model.layers[1].attn
        layer.packed_ran = layer.packed_backend  # it lies about what it does

        def causal(x: torch.Tensor, y: Any, *, mask: Any, input_pos: Any) -> torch.Tensor:
            return MultiHeadAttention.forward(layer, x, y, mask=None, input_pos=input_pos)

        layer.forward = causal

    installed_with(monkeypatch, spoil)
    code, failed, _ = check(config_of(tmp_path))
    assert code == 1
    assert failed >= {"logits, packed - alone", "leak into other documents", "attention pattern"}
    assert "backend of the layers" in failed
    said = " ".join(capsys.readouterr().out.split())
    assert "first in layers.1.attn." in said
    assert "layers.1.attn really ran scaled_dot_product" in said


def test_another_backend_than_the_chosen_one_is_caught(tmp_path: Path, monkeypatch: Any) -> None:
    def spoil(model: Any, attention: Any) -> None:
        attention.prepare = lambda seq_lens, s, real_lengths=None: block_causal_mask(seq_lens, s)

    installed_with(monkeypatch, spoil)
    code, failed, _ = check(config_of(tmp_path, attention_backend="varlen"))
    assert (code, failed) == (1, {"backend of the layers"})


def test_wrong_gradients_are_caught(tmp_path: Path, monkeypatch: Any) -> None:
    def spoil(model: Any, attention: Any) -> None:
        model.layers[0].attn.v_proj.weight.register_hook(lambda grad: grad * 1.01)

    installed_with(monkeypatch, spoil)
    code, failed, _ = check(config_of(tmp_path))
    assert code == 1
    assert {"gradients, relative"} <= failed <= {"gradients, relative", "gradient norm, relative"}


def test_tokens_that_are_not_the_stores_are_caught(tmp_path: Path, monkeypatch: Any) -> None:
    def spoil(batch: dict[str, Any]) -> None:
        batch["tokens"][0, 3] += 1

    collated_with(monkeypatch, spoil)
    code, failed, _ = check(config_of(tmp_path))
    assert code == 1
    assert "documents as stored" in failed


def test_positions_beyond_the_rotary_table_are_caught_before_the_model_runs(
    tmp_path: Path,
) -> None:
    code, failed, _ = check(config_of(tmp_path, **{"model.max_seq_len": 16}))
    assert (code, failed) == (1, {"largest position", "the model"})


def test_packs_of_one_document_prove_nothing(tmp_path: Path) -> None:
    changes = ALL_TRAINED | {"dataset.max_seq_len": 20}
    code, failed, _ = check(config_of(tmp_path, **changes))
    assert (code, failed) == (1, {"leak into other documents"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "the config lacks model"),
        ({"check_packs": 0}, "`check_packs` is 0; it must be a whole number of at least 1"),
        ({"check_packs": "two"}, "`check_packs` is 'two'; it must be a whole number"),
        ({"batch_size": 0}, "`batch_size` is 0; it must be a whole number"),
        ({"dataset": {"_component_": "tests.tiny.Sums"}}, "`dataset` is not packed"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config_of(tmp_path, **changes))
