"""Everything about a config that can be known to be wrong before anything slow happens.

``check_config`` looks at the whole config and reports all problems together, each as one
sentence with the value found, the limit and the remedy. It builds the model on the meta device
(shapes only, no memory) and reads nothing but small JSON files. What depends on the data is checked
when the data set has been opened, still before weights are read (``check_data``).
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune import utils

from torchtune_packing.attention_choice import attention_layers, check_backend
from torchtune_packing.components import find_component
from torchtune_packing.datasets.packed import check_plan_arguments
from torchtune_packing.training.checkpoint import RunCheckpoints
from torchtune_packing.training.config_values import (
    device_problems,
    resolve_dtype,
    value_problems,
)
from torchtune_packing.training.refusals import explained, require_config_file

__all__ = [
    "COMMON_KEYS",
    "LORA_KEYS",
    "check_config",
    "check_data",
    "check_resume",
    "dataset_problems",
    "explained",
    "is_padding_free",
    "part_problems",
    "refuse",
    "require_config_file",
    "unknown_keys",
]

#: The keys of recipes/full_finetune.py; docs/recipes.md explains each.
COMMON_KEYS = frozenset(
    """
    output_dir model_dir tokenizer model checkpointer dataset dataset_val collate_fn max_tokens
    batch_size gradient_accumulation_steps packs_per_step epochs max_steps_per_epoch optimizer
    lr_scheduler clip_grad_norm loss_reduction num_output_chunks seed shuffle balance num_workers
    device dtype attention_backend compile enable_activation_checkpointing
    enable_activation_offloading fsdp_cpu_offload fsdp_reshard_after_forward custom_sharded_layers
    metric_logger log_every_n_steps profiler run_val_every_n_steps val_batch_size save_every_n_steps
    keep_last_n_checkpoints resume_from_checkpoint overwrite_output_dir show_example
    require_lower_val_loss max_token_loss
    """.split()
)
#: The keys that recipes/lora_finetune.py adds.
LORA_KEYS = frozenset({"save_merged_weights"})

_REQUIRED = "output_dir tokenizer model checkpointer dataset optimizer epochs device dtype".split()
_COLLATES = ("collate_packed", "collate_flattened")
#: Hugging Face config.json field -> what it is in a torchtune decoder.
_SHAPES = {
    "hidden_size": lambda model: model.tok_embeddings.embedding_dim,
    "vocab_size": lambda model: model.tok_embeddings.num_embeddings,
    "num_hidden_layers": lambda model: len(model.layers),
    "num_attention_heads": lambda model: model.num_heads,
}


def unknown_keys(cfg: Mapping[str, Any], known: Iterable[str]) -> Iterator[str]:
    """Yields a sentence for every key that a recipe does not know."""
    known = set(known)
    text = json.dumps(cfg)
    for key in cfg:
        if key in known or f"${{{key}" in text:  # a name of the user's own that ${name} refers to
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        remove = "remove it (docs/recipes.md lists all keys)."
        hint = f"did you mean `{close[0]}`?" if close else remove
        yield f"unknown key `{key}`: {hint}"


def is_padding_free(cfg: DictConfig) -> bool:
    """Whether the config asks for padding-free batches of samples that nobody packed."""
    return "collate_flattened" in str(cfg.get("collate_fn", ""))


def dataset_problems(cfg: DictConfig) -> Iterator[str]:
    """Yields a sentence for everything that the nodes of the data sets cannot mean."""
    collate = str(cfg.get("collate_fn", None) or _COLLATES[0])
    flattened = is_padding_free(cfg)
    if not collate.endswith(_COLLATES):
        yield f"`collate_fn` is {collate}; it must be torchtune_packing.{' or '.join(_COLLATES)}."
    sized = cfg.get("max_tokens", None) is not None
    if sized and not flattened:
        yield (
            "`max_tokens` sizes padding-free batches; set collate_fn to "
            "torchtune_packing.collate_flattened, or size packs by dataset.max_seq_len."
        )
    elif sized and cfg.get("batch_size", None) is not None:
        yield "`max_tokens` and `batch_size` are both set, and both size a batch; keep one of them."
    for name in ("dataset", "dataset_val"):
        node = cfg.get(name, None)
        if node is None:
            continue
        if not isinstance(node, DictConfig) or "_component_" not in node:
            yield f"`{name}` is {node!r}; it must be a component: a mapping with `_component_`."
            continue
        component = str(node._component_)
        if component.rsplit(".", 1)[-1] == "packed_dataset":
            try:
                check_plan_arguments(node)
            except ValueError as error:
                yield f"`{name}`: {error}."
        if node.get("packed", False) and "packed_dataset" not in component:
            yield (
                f"`{name}.packed` is True, which asks for torchtune's own packs; wrap the data set "
                "instead: _component_: torchtune_packing.datasets.packed_dataset, source: {...}."
            )
        elif name == "dataset" and component.startswith("torchtune.datasets.") and not flattened:
            yield (
                f"`dataset` is {component}, which is not packed; wrap it as `source` of "
                "torchtune_packing.datasets.packed_dataset, or set collate_fn to "
                "torchtune_packing.collate_flattened for padding-free batches."
            )


def _checkpoint(cfg: DictConfig) -> Iterator[str]:
    node = cfg.get("checkpointer", None)
    if isinstance(node, DictConfig) and node.get("checkpoint_dir", None) is not None:
        folder = Path(str(node.checkpoint_dir))
        if not folder.is_dir():
            yield (
                f"`checkpointer.checkpoint_dir` is {folder}, which is no folder; download the "
                "model with the command at the top of the config, or correct the path."
            )
        else:
            files = node.get("checkpoint_files", None) or []
            names = [] if isinstance(files, DictConfig) else [str(f) for f in files]
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                held = sorted(p.name for p in folder.iterdir())[:8]
                yield (
                    f"`checkpointer.checkpoint_files` names {', '.join(missing)}, which {folder} "
                    f"does not hold (it holds {', '.join(held) or 'nothing'}); download it again."
                )


def _tokenizer(cfg: DictConfig) -> Iterator[str]:
    node = cfg.get("tokenizer", None)
    if isinstance(node, DictConfig):
        for key in ("path", "merges_file", "merges", "special_tokens_path"):
            path = node.get(key, None)
            if path is not None and not Path(str(path)).exists():
                yield f"`tokenizer.{key}` is {path}, which does not exist; correct the path."


def _components(node: Any, key: str = "") -> Iterator[str]:
    """Yields a sentence for every ``_component_``, at any depth, that names nothing."""
    if isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from _components(item, f"{key}[{index}]")
    if not isinstance(node, DictConfig):
        return
    for name, item in node.items():
        path = f"{key}.{name}" if key else str(name)
        if name == "_component_" and isinstance(item, str):
            try:
                yield from _arguments(node, key, find_component(item, path))
            except ValueError as error:
                yield str(error)
        else:
            yield from _components(item, path)


def _arguments(node: DictConfig, key: str, built_by: Any) -> Iterator[str]:
    """Yields a sentence for every key of a component that it would not take."""
    try:
        parameters = inspect.signature(built_by).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for name in node:
        if name != "_component_" and name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            remedy = f"did you mean `{close[0]}`?" if close else "remove it."
            yield f"`{key}.{name}` is no argument of {node._component_}; {remedy}"


def shapes_of_model(cfg: DictConfig) -> Any:
    """The model on the meta device, or the sentence that says why there is none."""
    from torchtune import config

    node = cfg.get("model", None)
    if not isinstance(node, DictConfig) or "_component_" not in node:
        return f"`model` is {node!r}; it must be a component: a mapping with `_component_`."
    try:
        with torch.device("meta"):
            return config.instantiate(node)
    except Exception as error:  # builders fail in their own ways; the config is at fault in all
        return f"`model` cannot be built: {' '.join(str(error).split())}"


def _model(cfg: DictConfig, model: Any, wants_adapter: bool) -> Iterator[str]:
    if isinstance(model, str):
        yield model
        return
    names = [name for name, _ in model.named_parameters()]
    has_adapter = any(".lora_a." in name for name in names)
    if has_adapter != wants_adapter:
        yield (
            f"`model` is {cfg.model._component_}, which "
            + (
                "has no adapter to train; use a lora_ or qlora_ builder, or full_finetune.py."
                if wants_adapter
                else "has an adapter; use lora_finetune.py, or a builder without one."
            )
        )
    if "attention_backend" in cfg and not list(device_problems(cfg)):
        device = utils.get_device(cfg.device)
        try:
            check_backend(
                str(cfg.attention_backend),
                attention_layers(model),
                device=device,
                dtype=resolve_dtype(cfg.dtype, device),
            )
        except ValueError as error:
            yield str(error)
    folder = cfg.get("checkpointer", {}).get("checkpoint_dir", None)
    facts_file = Path(str(folder)) / "config.json"
    if folder is None or not facts_file.is_file():
        return
    try:
        facts = json.loads(facts_file.read_text())
    except ValueError as error:
        yield f"{facts_file} is not JSON ({error}); download the model again."
        return
    for key, measure in _SHAPES.items():
        try:
            found = measure(model)
        except AttributeError:
            continue
        if key in facts and facts[key] != found:
            yield (
                f"`checkpointer.checkpoint_dir` holds another model: its {key} is {facts[key]}, "
                f"that of {cfg.model._component_} is {found}; let `model` and `checkpointer` name "
                "the same one."
            )
            return
    limit = getattr(model, "max_seq_len", None)
    wanted = cfg.get("tokenizer", {}).get("max_seq_len", None)
    if limit is not None and wanted is not None and wanted > limit:
        yield (
            f"`tokenizer.max_seq_len` is {wanted}, but the model has positions for {limit}; set it "
            f"to at most {limit}."
        )


def _resume(cfg: DictConfig) -> Iterator[str]:
    if cfg.get("output_dir", None) is None:
        return
    parent = Path(str(cfg.output_dir)).absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield f"`output_dir` is {cfg.output_dir}, but {parent} cannot be written; choose another."
        return
    newest = RunCheckpoints(str(cfg.output_dir)).latest()
    if cfg.get("resume_from_checkpoint", False):
        if newest is None:
            yield (
                f"`resume_from_checkpoint` is True, but {cfg.output_dir} holds no whole checkpoint "
                "(step_<n>); set it to False to start anew, or correct `output_dir`."
            )
    elif newest is not None and not cfg.get("overwrite_output_dir", False):
        yield (
            f"`output_dir` {cfg.output_dir} holds {newest.name} of an earlier run; go on from it "
            "with resume_from_checkpoint=True, choose another output_dir, or replace it with "
            "overwrite_output_dir=True."
        )


class ModelLimits(NamedTuple):
    """What the data must stay below; None where a model does not say.

    Attributes:
        positions: of the RoPE table.
        vocabulary: rows of the embedding.
    """

    positions: int | None = None
    vocabulary: int | None = None


def check_config(cfg: DictConfig, known_keys: Iterable[str], world_size: int = 1) -> ModelLimits:
    """Looks for everything that can be known to be wrong before the model or the data is touched.

    Args:
        cfg: the whole config of a recipe.
        known_keys: the recipe's keys.
        world_size: processes of the run.

    Returns:
        What the model can take.

    Raises:
        ValueError: with every problem found, one line each.
    """
    problems = list(unknown_keys(OmegaConf.to_container(cfg, resolve=False), known_keys))
    required = [*_REQUIRED, *([] if "max_tokens" in cfg else ["batch_size"])]
    problems += [
        f"`{key}` is missing; see configs/ for an example." for key in required if key not in cfg
    ]
    for check in (device_problems, dataset_problems, _checkpoint, _tokenizer, _resume):
        problems += check(cfg)
    misspelled = list(_components(cfg))
    problems += misspelled
    model = None
    if "model" in cfg and not any(line.startswith("`model.") for line in misspelled):
        model = shapes_of_model(cfg)
        problems += _model(cfg, model, wants_adapter=LORA_KEYS <= set(known_keys))
    problems += value_problems(cfg, world_size)
    refuse(problems)
    return model_limits(model)


def model_limits(model: Any) -> ModelLimits:
    """What a torchtune decoder can take, by its attributes alone."""
    embedding = getattr(model, "tok_embeddings", None)
    return ModelLimits(
        getattr(model, "max_seq_len", None), getattr(embedding, "num_embeddings", None)
    )


def refuse(problems: Sequence[str]) -> None:
    """Raises everything that is wrong with a config at once, if anything is.

    Raises:
        ValueError: with every problem, one line each.
    """
    if problems:
        head = "" if len(problems) == 1 else f"{len(problems)} problems in the config:\n  - "
        raise ValueError(head + "\n  - ".join(problems))


def part_problems(cfg: DictConfig, keys: Iterable[str]) -> Iterator[str]:
    """What is wrong with some parts of a config, for a command that reads no others.

    Args:
        cfg: the config.
        keys: those of ``tokenizer``, ``dataset``, ``model``, ``checkpointer`` and ``device`` that
            the command reads.
    """
    for key in keys:
        yield from _components(cfg.get(key, None), key)
    for key, check in (
        ("dataset", dataset_problems),
        ("tokenizer", _tokenizer),
        ("checkpointer", _checkpoint),
        ("device", device_problems),
    ):
        if key in keys:
            yield from check(cfg)


def check_data(dataset: Any, limits: ModelLimits, *, padding_free: bool, key: str) -> None:
    """Checks a data set that has been opened against the collate and the model.

    Args:
        dataset: what ``cfg.dataset`` built.
        limits: of the model.
        padding_free: whether batches are made by ``collate_flattened``.
        key: the config key to name in the message.

    Raises:
        ValueError: if the data set should be packed and is not, or has a document or a token id
            that the model cannot take.
    """
    from torchtune_packing.dataset import PackedDataset

    packed = isinstance(dataset, PackedDataset)
    if packed and padding_free and key == "dataset":
        raise ValueError("`dataset` is packed, but collate_flattened is for data that is not.")
    if not packed and not padding_free:
        raise ValueError(
            f"`{key}` is not packed; use "
            "torchtune_packing.datasets.packed_dataset, or set collate_fn to "
            "torchtune_packing.collate_flattened for padding-free batches."
        )
    longest = int(dataset.plan.lengths.max()) if packed else dataset.longest
    if limits.positions is not None and longest > limits.positions:
        remedy = f"lower {key}.max_seq_len to at most {limits.positions}"
        if packed and dataset.overlong not in ("truncate", "split"):
            remedy += f" and set {key}.overlong to truncate or split"
        raise ValueError(
            f"`{key}` has a document of {longest} tokens, but the model has positions for "
            f"{limits.positions}; {remedy}."
        )
    largest = dataset.store.accounting.largest_id
    if limits.vocabulary is not None and largest >= limits.vocabulary:
        raise ValueError(
            f"`{key}` has the token id {largest}, but the model's vocabulary has "
            f"{limits.vocabulary} ids; let `tokenizer` and `model` be of the same model."
        )


def _short(value: Any) -> str:
    """A value for a message; of a hash its beginning tells enough."""
    is_hash = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return f"{value[:12]}..." if is_hash else repr(value)


def check_resume(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuses to go on with other data or another model than the checkpoint was made with.

    Args:
        saved: the fingerprints in the checkpoint, name -> value.
        now: those of this run.
        folder: the checkpoint, for the message.

    Raises:
        ValueError: naming every value that differs, both as saved and as found.
    """
    differing = [
        f"{name} was {_short(saved.get(name))} and is now {_short(now.get(name))}"
        for name in sorted(set(saved) | set(now))
        if saved.get(name) != now.get(name)
    ]
    if differing:
        raise ValueError(
            f"{folder} was written by a run with other settings: {'; '.join(differing)}. Restore "
            "them to resume, or start anew with another output_dir."
        )
