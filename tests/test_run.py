"""What a run says of itself: waiting of its processes, validation on the way, how to go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.full_finetune import FullFinetuneRecipe
from recipes.lora_finetune import LoRAFinetuneRecipe
from tests.test_lora_finetune import lora_config
from tests.tiny import tiny_config
from torchtune_packing.accounting import accounting_lines
from torchtune_packing.training.data import TrainingData
from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.run import Run


def test_waiting_that_is_shown_is_that_of_the_order_that_runs(tmp_path: Path) -> None:
    cfg = tiny_config(tmp_path, gradient_accumulation_steps=2)
    started = Run.start(cfg, cfg.keys())
    started.ranks = Ranks(0, 2, torch.device("cpu"))
    data = TrainingData(started)

    def waits(balance: bool) -> str:
        lines = accounting_lines(
            data.dataset,
            2,
            data.sampler.packs_per_step,
            batch_size=cfg.batch_size,
            seed=started.seed,
            balance=balance,
        )
        return next(line for line in lines if line.startswith("2 ranks"))

    assert waits(True) in data.describe() and waits(True) != waits(False)


def test_command_to_go_on_names_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Run.start(tiny_config(tmp_path), tiny_config(tmp_path).keys())
    started.ranks = Ranks(0, 8, torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert " tune run --nproc_per_node 8 " in started.resume_command()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert " --nnodes 2 <rendezvous options> --nproc_per_node 4 " in started.resume_command()


@pytest.mark.parametrize(
    ("recipe", "config"),
    [(FullFinetuneRecipe, tiny_config), (LoRAFinetuneRecipe, lora_config)],
)
def test_validation_on_the_way_is_printed_once_without_a_logger(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: type,
    config: Callable[..., Any],
) -> None:
    cfg = config(
        tmp_path, metric_logger=None, run_val_every_n_steps=2, max_steps_per_epoch=4, epochs=1
    )
    cfg.dataset_val = cfg.dataset
    started = recipe(cfg)
    started.setup()
    started.train()
    started.cleanup()
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("validation loss")]
    assert len(lines) == 2 and lines[0].endswith(" after 2 steps") and " before, " in lines[1]
