"""LoRA adapters on disk: in torchtune's format, in PEFT's, and merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from torchtune import training
from torchtune.modules.peft import get_lora_module_names, get_merged_lora_ckpt

from torchtune_packing.training.checkpoint import write_weights

__all__ = ["ADAPTER_FILE", "read_adapter", "write_adapter", "write_merged"]

#: The adapter under torchtune's names; what a resumed run reads.
ADAPTER_FILE = "adapter_model.pt"


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the adapter of a checkpoint, without executing anything.

    Raises:
        ValueError: if the folder has no adapter under torchtune's names, naming file and format.
    """
    path = folder / ADAPTER_FILE
    try:
        adapter = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as an adapter (expected a dictionary of tensors under "
            f"torchtune's names, as lora_finetune.py writes it): {error}"
        ) from error
    if not isinstance(adapter, dict) or not any(".lora_a." in name for name in adapter):
        raise ValueError(
            f"{path} holds no LoRA tensors under torchtune's names (...lora_a.weight); resume from "
            "a step_<n> folder of lora_finetune.py, not from an adapter in PEFT's format."
        )
    return adapter


def _peft_config(cfg_model: DictConfig, adapter: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    names = get_lora_module_names(
        list(cfg_model.lora_attn_modules),
        cfg_model.get("apply_lora_to_mlp", False),
        cfg_model.get("apply_lora_to_output", False),
    )
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": cfg_model.lora_rank,
        "lora_alpha": cfg_model.lora_alpha,
        "target_modules": names,
    }
    if any(name.endswith(".magnitude") for name in adapter):
        facts["use_dora"] = True
    return facts


def write_adapter(
    checkpointer: Any, folder: Path, adapter: dict[str, torch.Tensor], cfg_model: DictConfig
) -> None:
    """Writes an adapter in torchtune's format and in PEFT's, with PEFT's config.

    Args:
        checkpointer: a torchtune checkpointer that has loaded the base model.
        folder: the checkpoint being made.
        adapter: adapter tensors under torchtune's names, on the CPU.
        cfg_model: the config node of the LoRA builder.
    """
    state = {
        training.ADAPTER_KEY: dict(adapter),
        training.ADAPTER_CONFIG: _peft_config(cfg_model, adapter),
    }
    write_weights(checkpointer, folder, state, adapter_only=True)
    if "use_dora" in state[training.ADAPTER_CONFIG]:
        _order_dora_magnitudes(folder / "adapter_model.safetensors", checkpointer._config)


def _order_dora_magnitudes(path: Path, facts: Mapping[str, Any]) -> None:
    """Brings DoRA's q and k magnitudes into Hugging Face's order of rotary halves.

    torchtune 0.6.1 reorders the rows of ``lora_B`` for PEFT and forgets the magnitudes, which
    belong to the same rows; PEFT would then scale each row by another one's magnitude.
    """
    if not path.exists():  # families without PEFT support
        return
    tensors = load_file(path)
    heads = {"q_proj": facts["num_attention_heads"], "k_proj": facts["num_key_value_heads"]}
    for name, value in tensors.items():
        for projection, count in heads.items():
            if f"{projection}.lora_magnitude" in name:
                halves = value.view(count, -1, 2).transpose(1, 2)
                tensors[name] = halves.reshape(value.shape).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def write_merged(
    checkpointer: Any, folder: Path, weights: dict[str, torch.Tensor], cfg_model: DictConfig
) -> None:
    """Writes base and adapter as one ordinary model folder.

    Args:
        checkpointer: a torchtune checkpointer that has loaded the base model.
        folder: where the model goes; exists.
        weights: whole state dict of the LoRA model on the CPU, quantised weights dequantised.
        cfg_model: the config node of the LoRA builder.
    """
    # torchtune adds the adapter in place, and on a CPU these tensors are the model's own.
    adapted = {n.replace(".lora_a.weight", ".weight") for n in weights if ".lora_a." in n}
    weights = {n: v.clone() if n in adapted else v for n, v in weights.items()}
    merged = get_merged_lora_ckpt(weights, rank=cfg_model.lora_rank, alpha=cfg_model.lora_alpha)
    write_weights(checkpointer, folder, {training.MODEL_KEY: merged})
