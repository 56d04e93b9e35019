"""The full finetuning recipe on a tiny model: numbers, order, refusals, what a user sees."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from recipes.full_finetune import FullFinetuneRecipe
from tests.tiny import ByteTokenizer, Sums, read_metrics, tiny_config, tiny_model
from torchtune_packing import PackedDataset
from torchtune_packing.sampler import epoch_order


def train(folder: Path, recipe_class: Any = FullFinetuneRecipe, **changes: Any) -> Any:
    """Runs a recipe in this process; returns it with the exit code as ``code``."""
    recipe = recipe_class(tiny_config(folder, **changes))
    recipe.setup()
    recipe.code = recipe.train()
    recipe.cleanup()
    return recipe


def losses(folder: Path) -> list[float]:
    found = read_metrics(folder)
    return [found[step]["loss"] for step in sorted(found)]


def test_losses_and_weights_equal_a_plain_loop_over_single_documents(tmp_path: Path) -> None:
    """The oracle packs nothing: each document alone through the model, one sum over one count."""
    recipe = train(tmp_path, epochs=1, max_steps_per_epoch=3, lr_scheduler=None)

    torch.manual_seed(0)
    model = tiny_model()
    base = load_file(tmp_path / "base" / "model.safetensors")
    torch.manual_seed(0)  # the base was drawn with this seed
    model = tiny_model()
    assert torch.equal(base["model.embed_tokens.weight"], model.tok_embeddings.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    packs = PackedDataset(Sums(ByteTokenizer()), max_seq_len=64)
    order = epoch_order(len(packs), seed=1, epoch=0, shuffle=True)
    expected = []
    for step in range(3):
        documents = []
        for index in order[4 * step : 4 * step + 4]:
            pack, start = packs[int(index)], 0
            for length in pack["seq_lens"].tolist():
                documents.append(
                    (pack["tokens"][start : start + length], pack["labels"][start : start + length])
                )
                start += length
        count = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
        total = 0.0
        for tokens, labels in documents:
            logits = model(tokens.unsqueeze(0))[0, :-1]
            loss = F.cross_entropy(logits, labels[1:], reduction="sum") / count
            if loss.requires_grad and torch.isfinite(loss):
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(recipe.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_same_seed_same_losses_other_seed_other_order(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tmp_path, output_dir=str(tmp_path / name), seed=seed, epochs=1)
    a, b, c = (losses(tmp_path / name) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 4, "gradient_accumulation_steps": 1},
        {"batch_size": 1, "gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": None, "packs_per_step": 4},
        {"attention_backend": "sdpa"},
        {"enable_activation_checkpointing": True},
        {"num_output_chunks": 3},
        {"num_workers": 2},
        {"balance": False},
        {"compile": True},
    ],
)
def test_how_a_step_is_computed_does_not_change_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Batch cuts, accumulation, backend, checkpointing, chunks, workers: one loss curve."""
    plain = train(tmp_path, output_dir=str(tmp_path / "plain"), epochs=1, max_steps_per_epoch=3)
    other = train(
        tmp_path, output_dir=str(tmp_path / "other"), epochs=1, max_steps_per_epoch=3, **changes
    )
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    for (name, ours), theirs in zip(
        plain.model.named_parameters(), other.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_B16_document_reduction_is_another_loss(tmp_path: Path) -> None:
    train(tmp_path, output_dir=str(tmp_path / "t"), epochs=1, max_steps_per_epoch=1)
    train(
        tmp_path,
        output_dir=str(tmp_path / "d"),
        epochs=1,
        max_steps_per_epoch=1,
        loss_reduction="document",
    )
    assert losses(tmp_path / "t") != losses(tmp_path / "d")


def test_checkpoint_is_an_ordinary_model_folder(tmp_path: Path) -> None:
    """transformers loads it and gives the recipe's logits."""
    from transformers import LlamaForCausalLM

    recipe = train(tmp_path, epochs=1, max_steps_per_epoch=2)
    (folder,) = (tmp_path / "out").glob("step_*")
    theirs = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    tokens = torch.randint(256, (1, 40))
    ours = recipe.model.eval()
    mask = recipe.attention.prepare(torch.tensor([[40]], dtype=torch.int32), 40)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(tokens, input_pos=torch.arange(40)[None], mask=mask),
            theirs(tokens).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def test_B9_B59_validation_counts_every_token_once_packed_or_not(tmp_path: Path) -> None:
    """Against single documents; for batch sizes that do not divide, packed and unpacked."""
    val = {"_component_": "tests.tiny.Sums", "num_samples": 7, "seed": 5}
    packed = {
        "_component_": "torchtune_packing.datasets.packed_dataset",
        "max_seq_len": 64,
        "source": val,
    }
    found = []
    for number, (node, size) in enumerate(((packed, 1), (packed, 2), (val, 1), (val, 3))):
        recipe = train(
            tmp_path,
            output_dir=str(tmp_path / str(number)),
            dataset_val=node,
            val_batch_size=size,
            epochs=1,
            max_steps_per_epoch=2,
        )
        found.append(recipe.validate())
    model, total, count = recipe.model, 0.0, 0
    model.eval()
    ds = Sums(ByteTokenizer(), num_samples=7, seed=5)
    with torch.no_grad():
        for sample in (ds[i] for i in range(7)):
            tokens, labels = torch.tensor([sample["tokens"]]), torch.tensor(sample["labels"])
            n = tokens.shape[1]
            mask = recipe.attention.prepare(torch.tensor([[n]], dtype=torch.int32), n)
            logits = model(tokens, input_pos=torch.arange(n)[None], mask=mask)[0, :-1]
            total += F.cross_entropy(logits, labels[1:], reduction="sum").item()
            count += int((labels[1:] != -100).sum())
    assert found == pytest.approx([total / count] * 4, rel=1e-5)


def test_B5_step_without_targets_moves_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss 0.0, weights unchanged bit for bit in spite of weight decay, one warning."""
    recipe = FullFinetuneRecipe(tiny_config(tmp_path, epochs=1, max_steps_per_epoch=3))
    recipe.setup()
    weights, seen = [], []
    plain_step = recipe.train_step

    def train_step(step: Any) -> None:
        if step.position.step == 2:  # the second step loses all its targets
            for item in step.micro_batches:
                item.batch["labels"].fill_(-100)
            step.rows[:] = [type(r)(r.rows[:0], r.targets[:0], None, 0) for r in step.rows]
            step.counts.trained = step.counts.divisor = 0
        plain_step(step)
        seen.append(step.position.step)
        weights.append({n: p.detach().clone() for n, p in recipe.model.named_parameters()})

    monkeypatch.setattr(recipe, "train_step", train_step)
    recipe.train()
    recipe.cleanup()
    assert seen == [1, 2, 3]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert not all(torch.equal(weights[1][n], weights[2][n]) for n in weights[0])
    found = read_metrics(tmp_path / "out")
    assert found[2]["loss"] == 0.0 and found[2]["grad_norm"] == 0.0
    assert capsys.readouterr().out.count("step 2 has no trained target; no weight moved") == 1


def test_B5_only_untrained_samples_are_refused_before_the_model(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config.dataset.source.trained = False
    recipe = FullFinetuneRecipe(config)
    with pytest.raises(ValueError, match="no.* trained|trained token"):
        recipe.setup()
    assert not hasattr(recipe, "model")


def test_B18_fewer_packs_than_a_step_needs(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, batch_size=50, gradient_accumulation_steps=4)
    recipe = FullFinetuneRecipe(config)
    with pytest.raises(ValueError, match="packs.*50.*4|200"):
        recipe.setup()
    assert not hasattr(recipe, "model")


def test_B21_scheduler_counts_the_steps_of_packs(tmp_path: Path) -> None:
    """52 samples of 100 tokens in packs of 1,000: 6 packs, accumulation 2, 3 epochs: 9 steps."""
    config = tiny_config(
        tmp_path,
        epochs=3,
        max_steps_per_epoch=None,
        batch_size=1,
        gradient_accumulation_steps=2,
    )
    config.dataset = {
        "_component_": "torchtune_packing.datasets.packed_dataset",
        "max_seq_len": 1000,
        "source": {"_component_": "tests.tiny.Hundreds", "num_samples": 52},
    }
    recipe = FullFinetuneRecipe(config)
    recipe.setup()
    assert len(recipe.data.dataset) == 6
    assert recipe.data.steps_per_epoch == 3
    assert recipe.data.total_steps == 9


def test_not_packed_data_set_is_refused_after_opening_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config.dataset = {"_component_": "tests.tiny.Sums"}
    recipe = FullFinetuneRecipe(config)
    with pytest.raises(ValueError, match="`dataset` is not packed.*collate_flattened"):
        recipe.setup()
    assert not hasattr(recipe, "model")


def test_document_longer_than_the_models_positions(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config.dataset.max_seq_len = 1000
    config.dataset.source = {"_component_": "tests.tiny.Hundreds", "num_samples": 40, "length": 300}
    recipe = FullFinetuneRecipe(config)
    with pytest.raises(ValueError, match="300 tokens, but the model has positions for 256"):
        recipe.setup()
    assert not hasattr(recipe, "model")


def test_B43_loss_that_is_no_number_stops_with_step_and_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = FullFinetuneRecipe(tiny_config(tmp_path, epochs=1))
    recipe.setup()
    real = recipe.forward.loss
    calls = iter(range(100))
    monkeypatch.setattr(
        recipe.forward,
        "loss",
        lambda batch, rows: real(batch, rows) * (float("nan") if next(calls) == 2 else 1.0),
    )
    order = epoch_order(len(recipe.data.dataset), seed=1, epoch=0, shuffle=True)
    with pytest.raises(FloatingPointError) as caught:
        recipe.train()
    assert "loss of step 2 is nan" in str(caught.value)
    assert str([int(i) for i in order[4:8]]) in str(caught.value)


def test_require_lower_val_loss_decides_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    val = {
        "_component_": "torchtune_packing.datasets.packed_dataset",
        "max_seq_len": 64,
        "source": {"_component_": "tests.tiny.Sums", "num_samples": 20, "seed": 9},
    }
    common = {"dataset_val": val, "require_lower_val_loss": True, "epochs": 1, "show_example": 3}
    good = train(tmp_path, output_dir=str(tmp_path / "good"), **common)
    shown = capsys.readouterr().out
    assert good.code == 0
    for words in (
        "before training",
        "after training",
        "written by a person",
        "validation loss:",
        "checkpoint:",
        "resume_from_checkpoint=True",
        "real tokens/s (padding not counted)",
    ):
        assert words in shown
    bad = train(
        tmp_path,
        output_dir=str(tmp_path / "bad"),
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.0},
        **common,
    )
    assert bad.code == 1
    assert "the validation loss did not fall" in capsys.readouterr().out


def test_saves_and_keeps_as_asked(tmp_path: Path) -> None:
    train(tmp_path, save_every_n_steps=2, keep_last_n_checkpoints=2)
    assert sorted(p.name for p in (tmp_path / "out").glob("step_*")) == [
        "step_000010",
        "step_000012",
    ]
    facts = json.loads((tmp_path / "out" / "step_000010" / "training_state.json").read_text())
    assert facts["position"] == {"step": 10, "epoch": 1, "packs_consumed": 16}


def test_component_emptied_on_the_command_line_counts_as_absent(tmp_path: Path) -> None:
    """torchtune turns `dataset_val=null` into `dataset_val._component_=null`."""
    config = tiny_config(tmp_path, lr_scheduler={"_component_": None, "num_warmup_steps": 2})
    recipe = FullFinetuneRecipe(config)
    recipe.setup()
    assert recipe.scheduler is None


def edited_recipe(page: str, recipe: str) -> str:
    """The recipe after what the page says: its function pasted in, its lines put for others."""
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (diff,) = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    old, new = (
        "".join(line[1:] + "\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+"
    )
    assert recipe.count(old) == 1
    recipe = recipe.replace(old, new)
    begin = recipe.index("class FullFinetuneRecipe")
    return recipe[:begin] + block + "\n\n" + recipe[begin:]


def test_worked_edit_of_the_docs_adds_its_term(tmp_path: Path) -> None:
    """docs/recipes.md shows a z-loss: in the first step it adds 1e-4 * mean(logsumexp ** 2)."""
    repo = Path(__file__).parent.parent
    source = (repo / "recipes" / "full_finetune.py").read_text()
    names: dict[str, Any] = {"__name__": "z_loss"}
    exec(edited_recipe((repo / "docs" / "recipes.md").read_text(), source), names)
    squares: list[torch.Tensor] = []
    found = []
    for name, kind in (("plain", FullFinetuneRecipe), ("edited", names["FullFinetuneRecipe"])):
        out = str(tmp_path / name)
        recipe = kind(tiny_config(tmp_path, output_dir=out, max_steps_per_epoch=1))
        recipe.setup()
        real = recipe.forward.logits

        def logits(*args: Any, real: Any = real) -> Any:
            got = real(*args)
            squares.append(got.detach().exp().sum(-1).log().square().flatten())
            return got

        if name == "edited":
            recipe.forward.logits = logits
        recipe.train()
        found.append(losses(tmp_path / name)[0])
    # The first step's two micro-batches of the edited run.
    added = 1e-4 * torch.cat(squares[:2]).mean().item()
    assert found[1] - found[0] == pytest.approx(added, rel=1e-3)


def test_tensorboard_and_profiler_write_their_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(
        tmp_path,
        epochs=1,
        metric_logger={
            "_component_": "torchtune.training.metric_logging.TensorBoardLogger",
            "log_dir": str(tmp_path / "board"),
            "organize_logs": False,
        },
        profiler={
            "enabled": True,
            "output_dir": str(tmp_path / "profile"),
            "cpu": True,
            "cuda": False,
            "wait_steps": 1,
            "warmup_steps": 1,
            "active_steps": 2,
            "num_cycles": 1,
        },
    )
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [e.step for e in events.Tensors("loss")] == [1, 2, 3, 4, 5, 6]
    assert list((tmp_path / "profile").rglob("*.json*"))
