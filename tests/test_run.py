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
from torchtune_packing.training.checkpoint import RunCheckpoints
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


class Ids:
    """Ten samples of given tokens, as a data set that a config can name."""

    def __init__(self, tokenizer: Any, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self.tokens, "labels": self.tokens}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("last", [259, 260])
def test_ids_beyond_the_vocabulary_are_refused_before_weights_are_read(
    tmp_path: Path, packed: bool, last: int
) -> None:
    """The tiny model has 260 ids."""
    source = {"_component_": "tests.test_run.Ids", "tokens": [5, 6, last, 7]}
    cfg = tiny_config(tmp_path)
    cfg.dataset = {
        "_component_": "torchtune_packing.datasets.packed_dataset",
        "max_seq_len": 4,
        "source": source,
    }
    if not packed:
        cfg.dataset = source
        cfg.collate_fn = "torchtune_packing.collate_flattened"
    run = Run.start(cfg, cfg.keys())
    if last == 259:
        TrainingData(run)
    else:
        with pytest.raises(ValueError, match=r"token id 260, but .* has 260 ids; .*tokenizer"):
            TrainingData(run)
    run.close()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    recipes = []
    for _ in range(2):
        recipe = FullFinetuneRecipe(tiny_config(tmp_path, epochs=1, max_steps_per_epoch=2))
        recipes.append(recipe)
    recipes[0].setup()
    with pytest.raises(ValueError, match=r"`output_dir` .* is in use by another run; .* another"):
        recipes[1].setup()
    recipes[0].train()
    recipes[0].cleanup()
    again = FullFinetuneRecipe(
        tiny_config(tmp_path, epochs=1, max_steps_per_epoch=2, overwrite_output_dir=True)
    )
    again.setup()
    again.cleanup()


def test_a_folder_that_cannot_be_written_is_told() -> None:
    """No permission says so of /proc; only trying tells."""
    with pytest.raises(ValueError, match=r"`output_dir` is /proc/none, which cannot be written"):
        RunCheckpoints("/proc/none").claim()


@pytest.mark.parametrize("number", [20, -21])
def test_a_document_to_show_that_is_not_there_is_refused(tmp_path: Path, number: int) -> None:
    cfg = tiny_config(tmp_path, show_example=number)
    cfg.dataset_val = {"_component_": "tests.tiny.Sums", "num_samples": 20}
    recipe = FullFinetuneRecipe(cfg)
    with pytest.raises(ValueError, match=f"`show_example` is {number}, but .* has 20 documents"):
        recipe.setup()


def test_a_builder_that_fails_is_told_by_its_keys(tmp_path: Path) -> None:
    """What is left of another config's `source` under a data set that is not packed."""
    cfg = tiny_config(tmp_path, collate_fn="torchtune_packing.collate_flattened")
    cfg.dataset = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": {"_component_": "tests.tiny.Sums"},
        "split": "train",
    }
    run = Run.start(cfg, cfg.keys())
    with pytest.raises(ValueError, match=r"dataset torchtune.datasets.instruct_dataset could not"):
        TrainingData(run)


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
