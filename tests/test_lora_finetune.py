"""LoRA, QLoRA and DoRA: what is trained, what is saved, and what other libraries make of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from recipes.lora_finetune import LoRAFinetuneRecipe
from tests.test_full_finetune import losses
from tests.test_resume import finish, start
from tests.tiny import tiny_config, tiny_smollm2, write_tiny_checkpoint
from torchtune_packing.training.adapter import read_adapter
from torchtune_packing.training.checkpoint import RunCheckpoints

LORA = {
    "_component_": "tests.tiny.tiny_lora_model",
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "qlora": {"_component_": "tests.tiny.tiny_smollm2"},
}


def lora_config(folder: Path, kind: str = "lora", **changes: Any) -> Any:
    if kind == "qlora":
        write_tiny_checkpoint(folder / "base", build=tiny_smollm2)
    return tiny_config(folder, **{"model": LORA | KINDS[kind], "optimizer.lr": 0.02, **changes})


def train(config: Any) -> LoRAFinetuneRecipe:
    recipe = LoRAFinetuneRecipe(config)
    recipe.setup()
    assert recipe.train() == 0
    recipe.cleanup()
    return recipe


def dense(parameter: torch.Tensor) -> torch.Tensor:
    """A copy as plain numbers, also of a weight held in 4 bits."""
    if hasattr(parameter, "get_original_weight"):
        return parameter.get_original_weight()
    return parameter.detach().clone()


def recipe_logits(recipe: Any, tokens: torch.Tensor) -> torch.Tensor:
    n = tokens.shape[1]
    mask = recipe.attention.prepare(torch.tensor([[n]], dtype=torch.int32), n)
    with torch.no_grad():
        return recipe.model.eval()(tokens, input_pos=torch.arange(n)[None], mask=mask)


@pytest.mark.parametrize("kind", list(KINDS))
def test_only_the_adapter_moves_and_the_loss_falls(tmp_path: Path, kind: str) -> None:
    config = lora_config(tmp_path, kind)
    recipe = LoRAFinetuneRecipe(config)
    recipe.setup()
    before = {n: dense(p) for n, p in recipe.model.named_parameters()}
    trained = {n for n, p in recipe.model.named_parameters() if p.requires_grad}
    assert all("lora_" in n or "magnitude" in n for n in trained) and trained
    recipe.train()
    for name, value in recipe.model.named_parameters():
        assert torch.equal(before[name], dense(value)) != (name in trained), name
    found = losses(tmp_path / "out")
    assert sum(found[-3:]) < sum(found[:3])


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_and_merged_weights_give_the_recipes_logits(tmp_path: Path, kind: str) -> None:
    """peft + transformers load the adapter on the base model; transformers loads the merged one."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    recipe = train(lora_config(tmp_path, kind, epochs=1, save_merged_weights=True))
    (folder,) = (tmp_path / "out").glob("step_*")
    tokens = torch.randint(256, (1, 40))
    ours = recipe_logits(recipe, tokens)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", torch_dtype=torch.float32)
    with torch.no_grad():
        assert (base(tokens).logits - ours).abs().max() > 0.1  # the adapter does something
        with_adapter = PeftModel.from_pretrained(base, folder).eval()
        torch.testing.assert_close(with_adapter(tokens).logits, ours, rtol=1e-4, atol=1e-4)
        merged = LlamaForCausalLM.from_pretrained(folder / "merged", torch_dtype=torch.float32)
        torch.testing.assert_close(merged(tokens).logits, ours, rtol=1e-4, atol=1e-4)


def test_B25_resume_takes_the_adapter_from_the_output_folder(tmp_path: Path) -> None:
    """Base in one folder, adapter in another; the resumed run is the whole one."""
    whole = train(lora_config(tmp_path, output_dir=str(tmp_path / "whole")))
    config = lora_config(tmp_path, output_dir=str(tmp_path / "parts"))
    first = LoRAFinetuneRecipe(config)
    first.setup()
    first.run.should_stop = lambda stop: first.position.step == 5
    first.train()
    first.cleanup()
    config.resume_from_checkpoint = True
    second = LoRAFinetuneRecipe(config)
    second.setup()
    assert second.position.step == 5
    second.train()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    adapters = [read_adapter(RunCheckpoints(r.cfg.output_dir).latest()) for r in (whole, second)]
    assert all(torch.equal(adapters[0][n], adapters[1][n]) for n in adapters[0])


def test_killed_lora_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """A real process, killed with SIGKILL after a save."""
    from tests.test_resume import slow, wait_for_step

    model = {"model": LORA, "optimizer.lr": 0.02}
    config = slow(tmp_path, "killed", **model)
    process = start(config, "lora")
    wait_for_step(config, 5, process)
    process.kill()
    process.communicate()
    assert RunCheckpoints(config.output_dir).latest() is not None
    finish(start(config, "lora", resume_from_checkpoint=True))
    whole = tiny_config(tmp_path, output_dir=str(tmp_path / "whole"), **model)
    finish(start(whole, "lora"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_two_ranks_give_the_losses_and_adapter_of_one(tmp_path: Path) -> None:
    common = {"gradient_accumulation_steps": None, "packs_per_step": 4}
    one = train(lora_config(tmp_path, output_dir=str(tmp_path / "one"), **common))
    config = lora_config(tmp_path, output_dir=str(tmp_path / "two"), **common)
    finish(start(config, "lora", ranks=2))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    adapters = [
        read_adapter(RunCheckpoints(f).latest()) for f in (one.cfg.output_dir, config.output_dir)
    ]
    for name, value in adapters[0].items():
        assert (adapters[1][name] - value).abs().max() < 1e-5, name


def test_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = lora_config(tmp_path, epochs=1, max_steps_per_epoch=1)
    train(config)
    config.resume_from_checkpoint = True
    config.model.lora_rank = 8
    resumed = LoRAFinetuneRecipe(config)
    with pytest.raises(ValueError, match="model.lora_rank was 4 and is now 8"):
        resumed.setup()
    assert not hasattr(resumed, "model")


def test_B25_adapter_in_another_format_is_named(tmp_path: Path) -> None:
    train(lora_config(tmp_path, epochs=1, max_steps_per_epoch=1))
    (folder,) = (tmp_path / "out").glob("step_*")
    peft = load_file(folder / "adapter_model.safetensors")
    torch.save(peft, folder / "adapter_model.pt")
    with pytest.raises(ValueError, match="adapter_model.pt .*torchtune's names.*PEFT"):
        read_adapter(folder)
    (folder / "adapter_model.pt").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="adapter_model.pt cannot be read .*dictionary of tensors"):
        read_adapter(folder)


def test_full_model_builder_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with pytest.raises(ValueError, match="no adapter.*full_finetune"):
        LoRAFinetuneRecipe(config)
    OmegaConf.update(config, "model", LORA, merge=False)
    from recipes.full_finetune import FullFinetuneRecipe

    with pytest.raises(ValueError, match="has an adapter.*lora_finetune"):
        FullFinetuneRecipe(config)


def test_8bit_optimizer_of_torchao_trains_and_resumes(tmp_path: Path) -> None:
    optimizer = {"_component_": "torchao.optim.AdamW8bit", "lr": 0.02}
    for name in ("whole", "parts"):
        config = lora_config(tmp_path, output_dir=str(tmp_path / name), optimizer=optimizer)
        recipe = LoRAFinetuneRecipe(config)
        recipe.setup()
        if name == "parts":
            recipe.run.should_stop = lambda stop, r=recipe: r.position.step == 5
        recipe.train()
    config.resume_from_checkpoint = True
    recipe = LoRAFinetuneRecipe(config)
    recipe.setup()
    recipe.train()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
