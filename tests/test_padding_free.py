"""The recipes on data that nobody packed: rows without padding, by samples or by tokens."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torchtune.data import padded_collate_sft
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from recipes.full_finetune import FullFinetuneRecipe
from recipes.lora_finetune import LoRAFinetuneRecipe
from tests.test_full_finetune import losses
from tests.test_lora_finetune import LORA, lora_config
from tests.test_resume import finish, start
from tests.tiny import ByteTokenizer, Sums, read_metrics, tiny_config, tiny_lora_model, tiny_model
from torchtune_packing.sampler import epoch_order
from torchtune_packing.token_batches import TokenBatchSampler
from torchtune_packing.training.data import TrainingData
from torchtune_packing.training.run import Run

FLAT = {
    "dataset": {"_component_": "tests.tiny.Sums", "num_samples": 60},
    "collate_fn": "torchtune_packing.collate_flattened",
    "epochs": 1,
}
BY_TOKENS = FLAT | {"max_tokens": 100, "batch_size": None, "max_steps_per_epoch": None}


def config_of(folder: Path, settings: dict[str, Any], **changes: Any) -> Any:
    cfg = tiny_config(folder, **(settings | changes))
    cfg.dataset = (settings | changes)["dataset"]  # not merged with the packed one
    for key in [key for key, value in cfg.items() if value is None]:
        del cfg[key]
    return cfg


def run(cfg: Any, seen: list[Any] | None = None) -> Any:
    recipe = FullFinetuneRecipe(cfg)
    recipe.setup()
    if seen is not None:
        plain = recipe.train_step
        recipe.train_step = lambda step: (seen.append(step), plain(step))[1]
    assert recipe.train() == 0
    recipe.cleanup()
    return recipe


def padded_loop(
    steps: list[list[list[int]]], sums: Any, model: Any = None, lr: float = 0.003
) -> tuple[list[float], Any]:
    """The oracle: the same samples in padded batches, one sum over one count in each step."""
    if model is None:
        torch.manual_seed(0)  # the base model was drawn with this seed
        model = tiny_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    found = []
    for step in steps:
        batches = [padded_collate_sft([sums[i] for i in batch], 257, -100) for batch in step]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            logits = model(batch["tokens"])[:, :-1].flatten(0, 1)
            targets = batch["labels"][:, 1:].flatten()
            loss = F.cross_entropy(logits, targets, reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, model


def assert_same_weights(recipe: Any, model: Any) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(recipe.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_batches_by_samples_equal_padded_batches(tmp_path: Path) -> None:
    """Three steps of 2 x 4 samples: losses, and weights, so gradients too."""
    seen: list[Any] = []
    cfg = config_of(
        tmp_path, FLAT, batch_size=4, max_steps_per_epoch=3, lr_scheduler=None, balance=False
    )
    recipe = run(cfg, seen)
    order = epoch_order(60, seed=1, epoch=0, shuffle=True).tolist()
    steps = [[order[8 * k : 8 * k + 4], order[8 * k + 4 : 8 * k + 8]] for k in range(3)]
    expected, model = padded_loop(steps, Sums(ByteTokenizer(), num_samples=60))
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    assert_same_weights(recipe, model)
    for step in seen:
        for item in step.micro_batches:
            assert item.batch["tokens"].shape[0] == 1
            assert item.batch["tokens"].numel() == int(item.real_lengths)  # no padding
            assert item.num_documents == 4
    metrics = read_metrics(tmp_path / "out")
    assert all(entry["fill"] == 1.0 for entry in metrics.values() if "fill" in entry)


def test_lora_on_batches_by_samples_equals_padded_batches(tmp_path: Path) -> None:
    cfg = lora_config(tmp_path, **FLAT, max_steps_per_epoch=3, lr_scheduler=None, balance=False)
    cfg.dataset = FLAT["dataset"]
    del cfg["lr_scheduler"]
    recipe = LoRAFinetuneRecipe(cfg)
    recipe.setup()
    adapted = tiny_lora_model(**{key: v for key, v in LORA.items() if key != "_component_"})
    adapted.load_state_dict(recipe.model.state_dict())
    set_trainable_params(adapted, get_adapter_params(adapted))
    assert recipe.train() == 0
    recipe.cleanup()
    order = epoch_order(60, seed=1, epoch=0, shuffle=True).tolist()
    steps = [[order[4 * k : 4 * k + 2], order[4 * k + 2 : 4 * k + 4]] for k in range(3)]
    expected, model = padded_loop(steps, Sums(ByteTokenizer(), num_samples=60), adapted, lr=0.02)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    assert_same_weights(recipe, model)


def test_batches_by_tokens_equal_padded_batches_and_hold_every_sample_once(tmp_path: Path) -> None:
    seen: list[Any] = []
    recipe = run(config_of(tmp_path, BY_TOKENS, lr_scheduler=None), seen)
    data = Sums(ByteTokenizer(), num_samples=60)
    lengths = [len(data[i]["tokens"]) for i in range(60)]
    sampler = TokenBatchSampler(lengths, max_tokens=100, gradient_accumulation_steps=2, seed=1)
    batches = list(sampler)
    steps = [batches[k : k + 2] for k in range(0, len(batches), 2)]
    assert len(seen) == len(steps) == recipe.data.total_steps
    expected, model = padded_loop(steps, data)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    assert_same_weights(recipe, model)

    texts = Counter()
    for step in seen:
        for item in step.micro_batches:
            assert item.batch["tokens"].numel() <= 100
            row, start = item.batch["tokens"][0].tolist(), 0
            for length in item.batch["seq_lens"][0].tolist():
                texts[tuple(row[start : start + length])] += 1
                start += length
    assert texts == Counter(tuple(data[i]["tokens"]) for i in range(60))


def test_epochs_have_other_batches_and_the_same_number_of_steps(tmp_path: Path) -> None:
    seen: list[Any] = []
    run(config_of(tmp_path, BY_TOKENS, epochs=2), seen)
    half = len(seen) // 2
    assert [step.position.epoch for step in seen] == [0] * half + [1] * half
    rows = [[item.batch["tokens"].tolist() for item in step.micro_batches] for step in seen]
    assert rows[:half] != rows[half:]


def test_ranks_share_every_sample_once_in_as_many_steps(tmp_path: Path) -> None:
    """Three ranks, dealt out in this process: what TrainingData gives each."""
    cfg = config_of(tmp_path, BY_TOKENS, gradient_accumulation_steps=1)
    found: list[list[list[int]]] = []
    for rank in range(3):
        started = Run.start(cfg, cfg.keys())
        data = TrainingData(started)
        data.sampler = TokenBatchSampler(
            data.dataset.store.seq_lens, max_tokens=100, rank=rank, world_size=3, seed=1
        )
        found.append(list(data.sampler))
        started.close()
    assert len({len(batches) for batches in found}) == 1
    assert all(batch for batches in found for batch in batches)
    assert sorted(i for batches in found for batch in batches for i in batch) == list(range(60))


def test_two_processes_find_the_losses_of_one(tmp_path: Path) -> None:
    """The same batches of each step, dealt to two ranks or to two micro-steps of one."""
    one = config_of(tmp_path, BY_TOKENS, output_dir=str(tmp_path / "one"), max_steps_per_epoch=4)
    run(one)
    two = OmegaConf.merge(
        one, {"output_dir": str(tmp_path / "two"), "gradient_accumulation_steps": 1}
    )
    finish(start(two, ranks=2))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_stop_and_resume_find_the_same_losses(tmp_path: Path) -> None:
    run(config_of(tmp_path, BY_TOKENS, output_dir=str(tmp_path / "whole")))
    cfg = config_of(tmp_path, BY_TOKENS, save_every_n_steps=3)
    recipe = FullFinetuneRecipe(cfg)
    recipe.setup()
    plain = recipe.train_step

    def stop_after_five(step: Any) -> None:
        if step.position.step == 6:
            raise KeyboardInterrupt
        plain(step)

    recipe.train_step = stop_after_five
    with pytest.raises(KeyboardInterrupt):
        recipe.train()
    recipe.cleanup()
    run(OmegaConf.merge(cfg, {"resume_from_checkpoint": True}))
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_B43_loss_that_is_no_number_names_the_samples_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = FullFinetuneRecipe(config_of(tmp_path, BY_TOKENS))
    recipe.setup()
    monkeypatch.setattr(recipe.forward, "loss", lambda batch, rows: torch.tensor(float("nan")))
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    with pytest.raises(FloatingPointError) as caught:
        recipe.train()
    lengths = recipe.data.dataset.store.seq_lens
    sampler = TokenBatchSampler(lengths, max_tokens=100, gradient_accumulation_steps=2, seed=1)
    (named,) = re.findall(r"samples \[([\d, ]+)\]\)", str(caught.value))
    assert sorted(map(int, named.split(", "))) == sorted(sum(list(sampler)[:2], []))


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (BY_TOKENS, {"batch_size": 4}, "`max_tokens` and `batch_size` are both set"),
        (FLAT, {"collate_fn": "torchtune.data.padded_collate_sft"}, "`collate_fn` is torchtune"),
        (
            FLAT,
            {
                "dataset": {
                    "_component_": "torchtune_packing.datasets.packed_dataset",
                    "max_seq_len": 64,
                    "source": {"_component_": "tests.tiny.Sums"},
                }
            },
            "`dataset` is packed, but collate_flattened is for data that is not",
        ),
        (BY_TOKENS, {"max_tokens": 20}, r"too long for a batch \(\d+ > 20 tokens\)"),
        (
            FLAT,
            {"dataset": {"_component_": "torchtune.datasets.hh_rlhf_helpful_dataset"}},
            "preference data",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_model(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FullFinetuneRecipe(config_of(tmp_path, settings, **changes)).setup()


def opened(cfg: Any) -> TrainingData:
    started = Run.start(cfg, cfg.keys())
    data = TrainingData(started)
    started.close()
    return data


@pytest.mark.parametrize("settings", [FLAT, BY_TOKENS], ids=["samples", "tokens"])
def test_balance_reaches_the_order(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert opened(config_of(tmp_path, settings)).sampler.balance is True
    assert opened(config_of(tmp_path, settings, balance=False)).sampler.balance is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": 120}, "max_tokens was 100 and is now 120"),
        ({"max_tokens": None, "batch_size": 2}, "max_tokens was 100 and is now None"),
    ],
)
def test_resume_with_batches_of_another_size_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """A position counts batches: with others it would repeat some samples and miss some."""
    run(config_of(tmp_path, BY_TOKENS, max_steps_per_epoch=1))
    cfg = config_of(
        tmp_path, BY_TOKENS, max_steps_per_epoch=2, resume_from_checkpoint=True, **changes
    )
    with pytest.raises(ValueError, match=said):
        FullFinetuneRecipe(cfg).setup()


def test_start_of_a_padding_free_run_shows_what_it_trains_on(tmp_path: Path) -> None:
    data = Sums(ByteTokenizer(), num_samples=60)
    lengths = [len(data[i]["tokens"]) for i in range(60)]
    trained = sum(sum(label != -100 for label in data[i]["labels"]) for i in range(60))
    by_tokens = opened(config_of(tmp_path, BY_TOKENS))
    steps = by_tokens.total_steps
    lines = by_tokens.describe().splitlines()
    assert lines[1].split() == ["documents", "in", "60", f"{sum(lengths):,}", "100.00", "%"]
    assert f"longest document: {max(lengths)} tokens" in lines[4]
    assert f"trained tokens: {100 * trained / sum(lengths):.1f} %" in lines[4]
    assert f"{60 / steps:,.1f} documents and {sum(lengths) / steps:,.0f} tokens" in lines[5]
    assert lines[-1].startswith(f"{2 * steps} batches of at most 100 tokens, 2 per step, {steps} ")
    assert max(map(len, lines)) <= 80
    by_samples = opened(config_of(tmp_path, FLAT, batch_size=4, max_steps_per_epoch=None))
    assert by_samples.describe().splitlines()[-1].startswith("60 samples, 8 per step, 7 steps")
