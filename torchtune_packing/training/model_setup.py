"""Building the model, optimizer, schedule and profiler of a run from its config.

The functions are thin: torchtune's own helpers do the work. They exist so that the two recipes
build the same way on one process and on many. Order matters and is kept in one place: build, choose
what is trained, compile, checkpoint activations, shard, fill with weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchtune import config, modules, training
from torchtune.modules.peft import (
    DoRALinear,
    LoRALinear,
    get_adapter_params,
    get_adapter_state_dict,
    set_trainable_params,
)

from torchtune_packing.training.parallel import Ranks

__all__ = [
    "build_model",
    "build_optimizer",
    "build_profiler",
    "build_scheduler",
    "gather_weights",
    "load_base_weights",
    "offloading_context",
    "optimizer_state",
    "random_state",
    "restore_random_state",
    "training_tensors",
]

_LONGEST_ROW = 1 << 30


def load_base_weights(
    cfg: DictConfig, resume_from: Path | None = None
) -> tuple[Any, dict[str, Any]]:
    """Opens the config's checkpointer and reads the weights to start from.

    Args:
        cfg: the run's config; ``cfg.checkpointer`` is a torchtune checkpointer component.
        resume_from: a checkpoint of ours to take the weights from instead of the base model's.

    Returns:
        The checkpointer (for saving later) and the weights under torchtune's names.
    """
    checkpointer = config.instantiate(cfg.checkpointer)
    if resume_from is None:
        return checkpointer, checkpointer.load_checkpoint()[training.MODEL_KEY]
    node = OmegaConf.create(OmegaConf.to_container(cfg.checkpointer, resolve=True))
    with open_dict(node):
        node.checkpoint_dir = str(resume_from)
        files = [p for p in resume_from.iterdir() if p.name.startswith("model")]
        node.checkpoint_files = sorted(
            p.name for p in files if p.suffix in (".safetensors", ".bin")
        )
    reader = config.instantiate(node)
    weights = reader.load_checkpoint()[training.MODEL_KEY]
    # Saving partitions the weights by this map; only a reader knows it.
    checkpointer._weight_map = getattr(reader, "_weight_map", None)
    return checkpointer, weights


def build_model(
    cfg: DictConfig,
    ranks: Ranks,
    dtype: torch.dtype,
    weights: dict[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Builds ``cfg.model``, loads it, and shards it with FSDP2 when there are several processes.

    Args:
        cfg: model, compile, activation checkpointing and FSDP settings under torchtune's keys.
        ranks: the processes of the run.
        dtype: of weights and computation.
        weights: full state dict under torchtune's names, the same on every rank.
        adapter: LoRA weights to continue from; None starts a LoRA model afresh.
        seed: draws a fresh adapter, the same on any number of processes.

    Returns:
        The model on ``ranks.device``, in training mode; for a model with LoRA layers only these
        are trained.

    Raises:
        ValueError: if the weights do not fit the model.
    """
    sharded = ranks.world_size > 1
    device = ranks.device
    with training.set_default_dtype(dtype), torch.device("meta") if sharded else device:
        model = config.instantiate(cfg.model)
    lora = bool(get_adapter_params(model))
    if lora:
        set_trainable_params(model, get_adapter_params(model))
    if cfg.get("compile", False):
        training.compile_model(model, verbose=False)
    if cfg.get("enable_activation_checkpointing", False):
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )
    offload = bool(cfg.get("fsdp_cpu_offload", False)) and sharded
    if sharded:
        names = cfg.get("custom_sharded_layers", None)
        condition = partial(training.get_shard_conditions, names_to_match=names)
        training.shard_model(
            model,
            shard_conditions=[condition],
            cpu_offload=offload,
            reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
        )
        with training.set_default_dtype(dtype), device:
            for module in model.modules():
                if isinstance(module, (LoRALinear, DoRALinear)):
                    module.to_empty(device="cpu" if offload else device)
                    module.initialize_parameters()
                if hasattr(module, "rope_init"):
                    module.rope_init()
    _load(model, weights, device, sharded=sharded, offload=offload, lora=lora)
    if lora:
        started = _initial_adapter(model, seed) if adapter is None else dict(adapter)
        _load(model, started, device, sharded=sharded, offload=offload, lora=True)
    if lora and adapter is None:
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()
    training.validate_no_params_on_meta_device(model)
    if cfg.get("num_output_chunks", None) is not None:
        model.set_num_output_chunks(cfg.num_output_chunks)
    # A row may be longer than the table of positions: they restart in each document, and documents
    # have been checked against the table. torchtune would refuse the row.
    model.max_seq_len = max(model.max_seq_len, _LONGEST_ROW)
    return model.train()


def _load(
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    device: torch.device,
    *,
    sharded: bool,
    offload: bool,
    lora: bool,
) -> None:
    try:
        if sharded:
            missing, unexpected = training.load_from_full_model_state_dict(
                model, weights, device, strict=not lora, cpu_offload=offload
            )
        else:
            missing, unexpected = model.load_state_dict(weights, strict=not lora)
    except (RuntimeError, AttributeError) as error:
        raise ValueError(
            f"The weights do not fit the model of the config: {error}. Check that `model`, "
            "`checkpointer.checkpoint_dir` and `checkpointer.model_type` belong together."
        ) from error
    if unexpected:
        raise ValueError(
            f"The checkpoint holds {len(unexpected)} tensors that the model of the config has no "
            f"place for, {sorted(unexpected)[0]!r} first; it is a checkpoint of another model."
        )


def _initial_adapter(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """A fresh adapter: A uniform with variance 1 / (3 fan_in), B zero (Hu et al., 2021).

    The same distribution as torchtune's, but drawn whole, from the run's seed. Drawn shard by
    shard, it would depend on the number of processes.
    """
    generator = torch.Generator().manual_seed(seed)
    started = {}
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        if name.endswith("lora_a.weight"):
            drawn = torch.empty(parameter.shape)
            bound = parameter.shape[1] ** -0.5
            started[name] = drawn.uniform_(-bound, bound, generator=generator).to(parameter.dtype)
        elif name.endswith("lora_b.weight"):
            started[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
    return started


def build_optimizer(
    cfg_optimizer: DictConfig,
    model: nn.Module,
    ranks: Ranks,
    state: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Builds the optimizer over the trained parameters and restores its state.

    Args:
        cfg_optimizer: any optimizer component (torch's AdamW, torchao's 8-bit AdamW, ...).
        model: built by ``build_model``.
        ranks: the processes of the run.
        state: what ``optimizer_state`` gave, on any number of ranks.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = config.instantiate(cfg_optimizer, trained)
    if state is not None:
        # A schedule leaves its base rate in the groups; torch restores only what it finds there.
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in group})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks.world_size > 1)
        set_optimizer_state_dict(
            model=model, optimizers=optimizer, optim_state_dict=dict(state), options=options
        )
    return optimizer


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, unsharded, on the CPU; to be called on every rank."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model=model, optimizers=optimizer, options=options)


def build_scheduler(
    cfg_scheduler: DictConfig | None,
    optimizer: torch.optim.Optimizer,
    *,
    num_training_steps: int,
    state: Mapping[str, Any] | None = None,
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Builds the learning rate schedule over the real number of optimizer steps.

    Args:
        cfg_scheduler: a torchtune schedule component, or None for a constant rate.
        optimizer: as ``build_optimizer`` made it, before its state is restored or after.
        num_training_steps: optimizer steps of the whole run.
        state: the schedule's saved state, to go on where a run stopped.
    """
    if cfg_scheduler is None:
        return None
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler = config.instantiate(cfg_scheduler, optimizer, num_training_steps=num_training_steps)
    if state is not None:
        scheduler.load_state_dict(dict(state))
        # Building the schedule set the rates of step 0; put back those that were restored.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # torchao's optimizers hold it in a tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
    return scheduler


def build_profiler(cfg_profiler: DictConfig | None) -> Any:
    """Torchtune's profiler from its config node, or its stand-in that does nothing."""
    if cfg_profiler is None or not cfg_profiler.get("enabled", False):
        return training.DummyProfiler()
    node = OmegaConf.create(OmegaConf.to_container(cfg_profiler, resolve=True))
    with open_dict(node):
        node.setdefault("_component_", "torchtune.training.setup_torch_profiler")
    profiler, _ = config.instantiate(node)
    return profiler


def offloading_context(model: nn.Module, cfg: DictConfig) -> AbstractContextManager[Any]:
    """The context in which a forward keeps its activations on the device or off it."""
    return training.get_act_offloading_ctx_manager(
        model, cfg.get("enable_activation_offloading", False)
    )


def gather_weights(model: nn.Module, ranks: Ranks, *, adapter: bool = False) -> dict[str, Any]:
    """The whole state dict (or the adapter's) on the CPU of rank 0; to be called on every rank."""
    if ranks.world_size > 1:
        return training.gather_cpu_state_dict(
            model, ranks.is_first, device=ranks.device, adapter_weights_only=adapter
        )
    state = model.state_dict()
    if adapter:
        return get_adapter_state_dict(state)
    # A plain tensor for each NF4 one; clones would double the memory, so others are only moved.
    return {
        name: value.to(value.dtype).cpu() if type(value) is not torch.Tensor else value.cpu()
        for name, value in state.items()
    }


def random_state(ranks: Ranks) -> dict[str, list[torch.Tensor]]:
    """The random generator states of all ranks, in rank order; to be called on every rank."""
    own = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(ranks.device)
    everyone = ranks.gather(own)
    return {key: [state[key] for state in everyone] for key in own}


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, ranks: Ranks
) -> dict[str, Any]:
    """All that a resumed run needs beside weights and position; to be called on every rank."""
    return {
        "optimizer": optimizer_state(model, optimizer),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "random": random_state(ranks),
    }


def restore_random_state(saved: Mapping[str, list[torch.Tensor]], ranks: Ranks) -> None:
    """Continues the random streams; a rank that is new since they were saved keeps its own."""
    if ranks.rank < len(saved["cpu"]):
        torch.set_rng_state(saved["cpu"][ranks.rank])
        if ranks.device.type == "cuda" and "cuda" in saved:
            torch.cuda.set_rng_state(saved["cuda"][ranks.rank], ranks.device)
