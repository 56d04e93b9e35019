"""torchtune's own recipes train on our packs by YAML alone, and find the losses of ours."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.full_finetune import FullFinetuneRecipe
from recipes.lora_finetune import LoRAFinetuneRecipe
from tests.conftest import REPO
from tests.tiny import read_metrics, tiny_config, write_tiny_checkpoint

STOCK = REPO / "configs" / "stock"
TUNE = [sys.executable, "-m", "torchtune._cli.tune"]


def overrides(folder: Path, model: str, **more: Any) -> list[str]:
    """What shrinks a stock config to the tiny model: components and folders, nothing else."""
    base = folder / "base"
    if not base.exists():
        write_tiny_checkpoint(base)
    values = {
        "model._component_": f"tests.tiny.{model}",
        "tokenizer._component_": "tests.tiny.ByteTokenizer",
        "dataset.source._component_": "tests.tiny.Sums",
        "dataset.max_seq_len": 64,
        "model_dir": base,
        "output_dir": folder / "stock",
        "shuffle": False,
        "max_steps_per_epoch": 2,
        **more,
    }
    return ["~tokenizer.path", *(f"{key}={value}" for key, value in values.items())]


def ours(folder: Path, recipe_class: Any, **changes: Any) -> list[float]:
    """Losses of two steps of our recipe on the same packs in the same order."""
    recipe = recipe_class(
        tiny_config(
            folder,
            output_dir=str(folder / "ours"),
            shuffle=False,
            batch_size=1,
            epochs=1,
            max_steps_per_epoch=2,
            clip_grad_norm=None,
            **changes,
        )
    )
    recipe.setup()
    recipe.train()
    recipe.cleanup()
    found = read_metrics(folder / "ours")
    return [found[step]["loss"] for step in sorted(found)]


def stock_losses(folder: Path) -> list[float]:
    """What torchtune's DiskLogger wrote: ``Step 1 | loss:5.5 lr:0.0001 ...``."""
    (log,) = (folder / "stock" / "logs").glob("log_*.txt")
    found = re.findall(r"^Step \d+ \| .*?loss:(\S+)", log.read_text(), re.MULTILINE)
    return [float(loss) for loss in found]


def test_full_single_device_by_tune_run(tmp_path: Path) -> None:
    command = [
        *TUNE,
        "run",
        "full_finetune_single_device",
        "--config",
        str(STOCK / "smollm2_full_single_device.yaml"),
        *overrides(tmp_path, "tiny_model"),
    ]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    stock = stock_losses(tmp_path)
    expected = ours(
        tmp_path,
        FullFinetuneRecipe,
        gradient_accumulation_steps=1,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-4},
        lr_scheduler=None,
    )
    assert len(stock) == 2 and stock == pytest.approx(expected, rel=1e-5)
    assert stock[0] != pytest.approx(stock[1], rel=1e-5)  # other packs, moved weights


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_lora_single_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe file that ``tune run`` would run, in this process.

    B of a fresh adapter is zero, so the first loss does not depend on how A was drawn. With
    accumulation 4 the second step sees packs 5 to 8 through weights that moved by about lr.
    """
    import torchtune

    site = Path(torchtune.__file__).parent.parent
    config = STOCK / "smollm2_lora_single_device.yaml"
    arguments = overrides(tmp_path, "tiny_lora_model", **{"optimizer.lr": 1e-8})
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", str(config), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(
            str(site / "recipes" / "lora_finetune_single_device.py"), run_name="__main__"
        )
    assert not ended.value.code
    expected = ours(
        tmp_path,
        LoRAFinetuneRecipe,
        gradient_accumulation_steps=4,
        model={
            "_component_": "tests.tiny.tiny_lora_model",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": 16,
            "lora_alpha": 32,
        },
        optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-8},
    )
    assert stock_losses(tmp_path) == pytest.approx(expected, rel=1e-5)
