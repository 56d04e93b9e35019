"""LoRA adapters on disk: in torchtune's format, in PEFT's, and merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
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
            f"{path} holds no LoRA tensors under torchtune's names (...lora_a.weight); resume from a "
            "step_<n> folder of lora_finetune.py, not from an adapter in PEFT's format."
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


def write_merged(
    checkpointer: Any, folder: Path, weights: dict[str, torch.Tensor], cfg_model: DictConfig
) -> None:
    """Writes base and adapter as one ordinary model folder.

    Args:
        checkpointer: a torchtune checkpointer that has loaded the base model.
        folder: where the model goes; exists.
        weights: whole state dict of the LoRA model on the CPU, quantised weights dequantised;
            changed in place.
        cfg_model: the config node of the LoRA builder.
    """
    merged = get_merged_lora_ckpt(weights, rank=cfg_model.lora_rank, alpha=cfg_model.lora_alpha)
    write_weights(checkpointer, folder, {training.MODEL_KEY: merged})
