"""What a config's numbers, switches, device and dtype mean, and which of them mean nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from omegaconf import DictConfig

__all__ = [
    "accumulation_steps",
    "computes_bf16",
    "device_name_problems",
    "device_problems",
    "positive_problems",
    "resolve_dtype",
    "value_problems",
]

_POSITIVE = (
    "batch_size gradient_accumulation_steps packs_per_step epochs max_steps_per_epoch max_tokens "
    "num_output_chunks log_every_n_steps run_val_every_n_steps val_batch_size save_every_n_steps "
    "keep_last_n_checkpoints"
).split()
_DTYPES = ("auto", "fp32", "bf16")


def accumulation_steps(cfg: DictConfig, world_size: int) -> int:
    """Micro-steps per optimizer step on each rank.

    Either ``gradient_accumulation_steps`` says it (per rank, as in torchtune), or
    ``packs_per_step`` fixes the packs of an optimizer step for the whole run, whatever the number
    of processes, and this is what is left for each.
    """
    if cfg.get("packs_per_step", None) is not None:
        rows = int(cfg.get("batch_size", None) or 1)  # max_tokens takes its place
        return int(cfg.packs_per_step) // (rows * world_size)
    return int(cfg.get("gradient_accumulation_steps", None) or 1)


def computes_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for bf16; a CPU without them is several times slower."""
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a config's ``dtype``: "fp32", "bf16", or "auto" for bf16 where it is native."""
    if name == "auto":
        name = "bf16" if computes_bf16(device) else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def positive_problems(cfg: DictConfig, keys: Iterable[str]) -> Iterator[str]:
    """Yields a sentence for each of some keys that is set, but to no whole number of 1 or more."""
    for key in keys:
        value = cfg.get(key, None)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"`{key}` is {value!r}; it must be a whole number of at least 1."


def value_problems(cfg: DictConfig, world_size: int) -> Iterator[str]:
    """Yields a sentence for every number or switch that is out of its range.

    Args:
        cfg: the config.
        world_size: processes of the run.
    """
    wrong = list(positive_problems(cfg, _POSITIVE))
    yield from wrong
    total, rows = cfg.get("packs_per_step", None), cfg.get("batch_size", None) or 1
    if total is not None and cfg.get("gradient_accumulation_steps", None) is not None:
        yield "`packs_per_step` and `gradient_accumulation_steps` are both set; keep one of them."
    elif not wrong and total is not None and total % (rows * world_size):
        yield (
            f"`packs_per_step` is {total}, which {world_size} processes with `batch_size` {rows} "
            f"cannot share evenly; make it a multiple of {rows * world_size}, or change the number "
            "of processes."
        )
    share = cfg.get("max_token_loss", None)
    if share is not None and not (isinstance(share, (int, float)) and 0 <= share <= 1):
        yield f"`max_token_loss` is {share!r}; it must be a share of the tokens from 0 to 1."
    reduction = cfg.get("loss_reduction", None)
    if reduction not in (None, "token", "document"):
        yield f"`loss_reduction` is {reduction!r}; it must be token or document."
    for key in ("shuffle", "balance"):
        if not isinstance(cfg.get(key, None), (bool, type(None))):
            yield f"`{key}` is {cfg[key]!r}; it must be True or False."
    workers = cfg.get("num_workers", None)
    if workers is not None and (type(workers) is not int or workers < 0):
        yield f"`num_workers` is {workers!r}; it must be a whole number, 0 for none."
    norm = cfg.get("clip_grad_norm", None)
    if norm is not None and norm != "inf" and not (type(norm) in (int, float) and norm > 0):
        yield f"`clip_grad_norm` is {norm!r}; it must be a number above 0, inf, or null."
    example = cfg.get("show_example", None)
    if example is not None and type(example) is not int:
        yield f"`show_example` is {example!r}; it must be the number of a document, or null."
    needs_validation = {
        "show_example": example is not None,
        "require_lower_val_loss": bool(cfg.get("require_lower_val_loss", False)),
    }
    for key, is_set in needs_validation.items():
        if is_set and cfg.get("dataset_val", None) is None:
            yield f"`{key}` is {cfg[key]!r}, which needs `dataset_val`; set that, or leave it out."
    seed = cfg.get("seed", None)
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        yield f"`seed` is {seed!r}; it must be a whole number of at least 0, or null."


def device_name_problems(cfg: DictConfig) -> Iterator[str]:
    """Yields a sentence for a device or dtype of a kind that no machine here has."""
    device, dtype = str(cfg.get("device", "cpu")), cfg.get("dtype", "auto")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        yield f"`device` is {device!r}; it must be cpu or cuda."
    if dtype not in _DTYPES:
        yield f"`dtype` is {dtype!r}; it must be one of {', '.join(_DTYPES)}."


def device_problems(cfg: DictConfig) -> Iterator[str]:
    """Yields a sentence for what this machine's device cannot do."""
    yield from device_name_problems(cfg)
    if "device" not in cfg or "dtype" not in cfg:
        return  # said already
    kind, dtype = str(cfg.device).split(":")[0], cfg.dtype
    cuda = torch.cuda.is_available()
    if kind == "cuda" and not cuda:
        yield "`device` is cuda, but torch finds no CUDA device here; set device=cpu."
    if dtype == "bf16" and kind == "cuda" and cuda and not computes_bf16(torch.device("cuda")):
        name = torch.cuda.get_device_name()
        yield f"`dtype` is bf16, which {name} does not compute; set dtype=fp32 or auto."
    if cfg.get("enable_activation_offloading", False):
        if kind != "cuda":
            yield "`enable_activation_offloading` needs device=cuda; set it to False on a CPU."
        elif not cfg.get("enable_activation_checkpointing", False):
            yield "`enable_activation_offloading` needs enable_activation_checkpointing=True too."
