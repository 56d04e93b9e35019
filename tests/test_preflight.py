"""Each refusal is one sentence with thing, value and remedy, before anything slow."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.tiny import tiny_config
from torchtune_packing.training import config_values, preflight
from torchtune_packing.training.checkpoint import RunCheckpoints, write_state
from torchtune_packing.training.run import Run


def problems(folder: Path, world_size: int = 1, **changes: Any) -> str:
    config = tiny_config(folder)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    with pytest.raises(ValueError) as caught:
        preflight.check_config(config, preflight.COMMON_KEYS, world_size)
    return str(caught.value)


def test_good_config_passes_and_tells_what_the_model_takes(tmp_path: Path) -> None:
    assert preflight.check_config(tiny_config(tmp_path), preflight.COMMON_KEYS) == (256, 260)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gradient_acumulation_steps": 2},
            ["`gradient_acumulation_steps`", "did you mean `gradient_accumulation_steps`"],
        ),
        ({"save_merged_weights": True}, ["unknown key `save_merged_weights`"]),
        ({"device": "cuda"}, ["`device` is cuda", "no CUDA device", "device=cpu"]),
        ({"device": "tpu"}, ["`device` is 'tpu'", "cpu or cuda"]),
        ({"dtype": "fp16"}, ["`dtype` is 'fp16'", "auto, fp32, bf16"]),
        ({"batch_size": 0}, ["`batch_size` is 0", "at least 1"]),
        ({"epochs": 1.5}, ["`epochs` is 1.5", "whole number"]),
        ({"loss_reduction": "mean"}, ["`loss_reduction` is 'mean'", "token or document"]),
        ({"balance": "no"}, ["`balance` is 'no'", "True or False"]),
        ({"seed": -1}, ["`seed` is -1", "at least 0"]),
        ({"enable_activation_offloading": True}, ["`enable_activation_offloading`", "device=cuda"]),
        (
            {"resume_from_checkpoint": True},
            ["`resume_from_checkpoint` is True", "no whole checkpoint", "set it to False"],
        ),
        (
            {"checkpointer__checkpoint_dir": "/nowhere/model"},
            ["/nowhere/model", "no folder", "download"],
        ),
        (
            {"checkpointer__checkpoint_files": ["a.safetensors"]},
            ["a.safetensors", "does not hold", "model.safetensors"],
        ),
        (
            {
                "tokenizer___component_": "torchtune.models.llama3.llama3_tokenizer",
                "tokenizer__path": "/nowhere/tokenizer.model",
            },
            ["`tokenizer.path` is /nowhere/tokenizer.model"],
        ),
        ({"tokenizer__max_len": 8}, ["`tokenizer.max_len` is no argument", "`max_seq_len`?"]),
        ({"optimizer__wd": 0.1}, ["`optimizer.wd` is no argument of torch.optim.AdamW; remove"]),
        ({"dataset__packed": True}, ["`dataset.packed` is no argument", "packed_dataset; remove"]),
        ({"dataset__source__size": 3}, ["`dataset.source.size` is no argument of tests.tiny.Sums"]),
        ({"dataset__strategy": "bestfit"}, ["`dataset`: strategy is 'bestfit'", "'sequential'"]),
        ({"dataset__max_seq_len": None}, ["dataset.max_seq_len", "tokenizer.max_seq_len"]),
        ({"num_workers": -1}, ["`num_workers` is -1", "0 for none"]),
        ({"num_workers": "two"}, ["`num_workers` is 'two'"]),
        ({"clip_grad_norm": -1}, ["`clip_grad_norm` is -1", "above 0"]),
        ({"clip_grad_norm": "large"}, ["`clip_grad_norm` is 'large'", "inf"]),
        ({"show_example": 3}, ["`show_example` is 3", "needs `dataset_val`"]),
        ({"require_lower_val_loss": True}, ["`require_lower_val_loss`", "needs `dataset_val`"]),
        ({"tokenizer__max_seq_len": 512}, ["`tokenizer.max_seq_len` is 512", "positions for 256"]),
        ({"model__embed_dim": 64}, ["another model", "hidden_size is 32", "is 64"]),
        ({"model__nonsense": 1}, ["`model` cannot be built", "nonsense"]),
        (
            {"dataset__packed": True, "dataset___component_": "torchtune.datasets.alpaca_dataset"},
            ["`dataset.packed` is True", "packed_dataset"],
        ),
        (
            {"dataset___component_": "torchtune.datasets.alpaca_dataset"},
            ["is not packed", "collate_flattened"],
        ),
        (
            {"optimizer___component_": "torch.optim.AdamWW"},
            ["`optimizer._component_` is torch.optim.AdamWW", "did you mean torch.optim.AdamW?"],
        ),
        (
            {"model___component_": "tests.tiny.tiny_modell"},
            ["`model._component_` is tests.tiny.tiny_modell", "did you mean tests.tiny.tiny_model"],
        ),
        (
            {"dataset__source___component_": "tests.tiny.Sumss"},
            ["`dataset.source._component_` is tests.tiny.Sumss", "did you mean tests.tiny.Sums?"],
        ),
        (
            {"attention_backend": "flash_attn"},
            ["attention_backend=flash_attn", "needs a CUDA device", "set it to auto"],
        ),
        ({"attention_backend": "fast"}, ["attention_backend is 'fast'", "varlen"]),
        ({"max_tokens": 100}, ["`max_tokens`", "collate_flattened"]),
        (
            {"packs_per_step": 8},
            ["`packs_per_step` and `gradient_accumulation_steps` are both set"],
        ),
    ],
)
def test_refusals_name_thing_value_and_remedy(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    found = problems(tmp_path, **changes)
    for word in words:
        assert word in found
    assert "\n" not in found  # one sentence for one problem


def test_world_size_that_does_not_divide_the_step(tmp_path: Path) -> None:
    found = problems(tmp_path, 3, packs_per_step=8, gradient_accumulation_steps=None)
    assert "`packs_per_step` is 8" in found and "3 processes" in found and "multiple of 6" in found


def test_packs_per_step_gives_each_process_its_share(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, packs_per_step=8, gradient_accumulation_steps=None)
    assert [config_values.accumulation_steps(config, w) for w in (1, 2, 4)] == [4, 2, 1]


def test_several_problems_come_together(tmp_path: Path) -> None:
    found = problems(tmp_path, device="cuda", dtype="fp16", batch_size=0, oops=1)
    assert found.startswith("4 problems in the config:\n  - ")
    assert found.count("\n  - ") == 4


def test_missing_keys_are_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    del config["optimizer"]
    with pytest.raises(ValueError, match="`optimizer` is missing; see configs/"):
        preflight.check_config(config, preflight.COMMON_KEYS)


def test_empty_config_names_each_missing_key_once() -> None:
    with pytest.raises(ValueError) as caught:
        preflight.check_config(OmegaConf.create({}), preflight.COMMON_KEYS)
    lines = str(caught.value).splitlines()
    assert lines[0] == "10 problems in the config:"
    assert all("is missing" in line for line in lines[1:])


def test_names_that_others_refer_to_are_no_unknown_keys(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model_dir=str(tmp_path / "base"))
    config.checkpointer.checkpoint_dir = "${model_dir}"
    preflight.check_config(config, preflight.COMMON_KEYS)


def test_values_at_the_ends_of_their_range_pass(tmp_path: Path) -> None:
    changes = {"num_workers": 0, "clip_grad_norm": "inf", "model_dir": "unused"}
    preflight.check_config(tiny_config(tmp_path, **changes), preflight.COMMON_KEYS)


def test_earlier_run_in_the_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    folder = RunCheckpoints(config.output_dir).write(7, lambda f: write_state(f, {}, {}))
    found = problems(tmp_path)
    assert "holds step_000007 of an earlier run" in found and "resume_from_checkpoint=True" in found
    assert folder.is_dir()
    config.overwrite_output_dir = True
    run = Run.start(config, preflight.COMMON_KEYS)
    assert folder.is_dir()  # the data, or the model, may still be refused
    run.claim_output_dir()
    assert not folder.exists()
    run.close()


def test_resume_with_other_settings_names_both_values(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        preflight.check_resume(
            {"dataset.max_seq_len": 64, "model": "a", "dataset.content": "0123456789abcdef" * 4},
            {"dataset.max_seq_len": 32, "model": "a", "dataset.content": "fedcba9876543210" * 4},
            tmp_path,
        )
    message = str(caught.value)
    assert "dataset.content was 0123456789ab... and is now fedcba987654...; dataset" in message
    assert "dataset.max_seq_len was 64 and is now 32" in str(caught.value)
    assert "model" not in str(caught.value).split("settings: ")[1].split(";")[0].split(".")[0]


def test_explained_prints_one_line_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, preflight.explained():
        raise ValueError("the thing is 3; make it 4.")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: the thing is 3; make it 4.\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "is no file; `python -m torchtune_packing ls`"), ("a: b: c\n", "is not YAML: mapping")],
)
def test_config_file_that_is_missing_or_no_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        preflight.require_config_file(["recipe.py", "--config", str(path)])
    assert caught.value.code == 1
    shown = capsys.readouterr().err
    assert words in shown and str(path) in shown and shown.count("\n") == 1


def test_sample_that_cannot_be_read_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    from torchtune_packing.store.ingest import SampleReadError

    with pytest.raises(SystemExit), preflight.explained():
        raise SampleReadError("reading sample 0 of the data set failed with KeyError: 'question'")
    assert capsys.readouterr().err.startswith("error: reading sample 0")


def test_refused_run_leaves_no_files_behind(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    run = Run.start(config, preflight.COMMON_KEYS)
    run.close()
    assert not Path(config.output_dir).exists()


def test_a_command_that_reads_parts_of_a_config_refuses_those_parts_alone(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config.optimizer._component_ = "no_such_package.AdamW"
    config.checkpointer.checkpoint_dir = "/nowhere/model"
    reads = ("tokenizer", "dataset", "model")
    assert list(preflight.part_problems(config, reads)) == []
    config.tokenizer._component_ = "tests.tiny.ByteTokeniser"
    config.device = "cuda"
    (tokenizer,) = preflight.part_problems(config, reads)
    assert "did you mean tests.tiny.ByteTokenizer?" in tokenizer
    *_, checkpoint, device = preflight.part_problems(config, (*reads, "checkpointer", "device"))
    assert "/nowhere/model" in checkpoint and "no CUDA device" in device
