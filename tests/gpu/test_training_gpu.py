"""The recipes on a CUDA device: losses of the CPU's run, metrics by events, waiting, the check."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.full_finetune import FullFinetuneRecipe
from recipes.lora_finetune import LoRAFinetuneRecipe
from tests.test_check_packing import check, config_of
from tests.test_lora_finetune import LORA
from tests.test_step import micro_batches
from tests.tiny import read_metrics, tiny_config, tiny_model
from torchtune_packing.attention import install_attention
from torchtune_packing.loss import loss_rows
from torchtune_packing.training.metrics import PHASES
from torchtune_packing.training.step import PackedForward

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (FullFinetuneRecipe, {}),
    "lora": (LoRAFinetuneRecipe, {"model": LORA, "optimizer.lr": 0.02}),
}
SAVED = {"enable_activation_checkpointing": True, "enable_activation_offloading": True}


def train(folder: Path, kind: str, device: str, dtype: str, **changes: Any) -> tuple[Any, list]:
    """Runs a recipe for six steps; the recipe and the losses it logged."""
    recipe_class, own = RECIPES[kind]
    output = folder / f"{device}_{dtype}"
    recipe = recipe_class(
        tiny_config(
            folder,
            **own,
            **changes,
            output_dir=str(output),
            device=device,
            dtype=dtype,
            epochs=1,
            max_steps_per_epoch=6,
        )
    )
    recipe.setup()
    assert recipe.train() == 0
    recipe.cleanup()
    found = read_metrics(output)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    return recipe, [found[step]["loss"] for step in sorted(found)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"compile": True}, SAVED, SAVED | {"compile": True}],
    ids=["plain", "compiled", "offloaded", "offloaded and compiled"],
)
@pytest.mark.parametrize("kind", RECIPES)
def test_losses_in_float32_are_those_of_the_cpu(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """Same data in the same order; two backends of the CPU differ by 1e-7 after these steps."""
    _, expected = train(tmp_path, kind, "cpu", "fp32")
    recipe, found = train(tmp_path, kind, "cuda", "fp32", **changes)
    assert next(recipe.model.parameters()).device.type == "cuda"
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", RECIPES)
def test_losses_in_bfloat16_stray_no_farther_than_on_the_cpu(tmp_path: Path, kind: str) -> None:
    """The limit is what bfloat16 does to the CPU's own losses, over all steps, times three."""
    _, exact = train(tmp_path, kind, "cpu", "fp32")
    _, rounded = train(tmp_path, kind, "cpu", "bf16")
    recipe, found = train(tmp_path, kind, "cuda", "bf16")
    assert recipe.attention.backend != "sdpa", recipe.attention.reason
    rounding = max(abs(a - b) for a, b in zip(exact, rounded, strict=True))
    assert max(abs(a - b) for a, b in zip(exact, found, strict=True)) <= 3 * rounding


def test_phases_are_timed_by_events_and_add_up_to_the_steps(tmp_path: Path) -> None:
    recipe, _ = train(tmp_path, "full", "cuda", "fp32")
    summary = recipe.meter.summary()
    shares = {name: summary[f"share_{name}"] for name in PHASES}
    assert all(shares[name] > 0 for name in PHASES), shares
    # The phases are disjoint parts of each step, and each step ends when its loss has been read.
    assert sum(shares.values()) <= 1.05, shares
    assert summary["steps"] == 6 and summary["real_tokens_per_second"] > 0
    logged = read_metrics(tmp_path / "cuda_fp32")[6]
    assert 0 < logged["peak_memory_gib"] <= logged["peak_memory_reserved_gib"]


@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "flash_attn"])
def test_the_recipes_own_forward_and_backward_never_wait(backend: str) -> None:
    """Two micro-batches from the CPU to gradients, under torch's check for synchronisation."""
    model = tiny_model().to(CUDA, torch.bfloat16)
    try:
        attn = install_attention(model, backend, device=CUDA, dtype=torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    assert attn.backend == backend, attn.reason
    forward = PackedForward(model, attn)
    items = micro_batches(pin_memory=True)[:2]
    rows = [loss_rows(item.batch["labels"], item.batch["seq_lens"]) for item in items]

    def step() -> None:
        for item, found in zip(items, rows, strict=True):
            forward.loss(item, found).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_check_passes_on_the_device(tmp_path: Path, dtype: str, capsys: Any) -> None:
    """Deterministic or not, every line of ``check_packing`` holds under what auto takes."""
    code, failed, _ = check(config_of(tmp_path, device="cuda", dtype=dtype))
    assert (code, failed) == (0, set()), capsys.readouterr().out
