"""The ``source`` of a packed data set: checked by name first, loaded only then."""

from __future__ import annotations

import glob
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import ConcatDataset

from torchtune_packing.components import find_component
from torchtune_packing.datasets.truncation import with_exact_truncation

__all__ = ["build_dataset", "check_source", "load_source", "named_files", "source_nodes"]


def source_nodes(source: Any) -> list[Any]:
    """Brings ``source`` into one form: a list of plain dicts (config nodes) or built data sets.

    Args:
        source: a config node with ``_component_``, a built data set, or a list of either.

    Raises:
        ValueError: there is no source, or a node has no ``_component_``.
    """
    from omegaconf import OmegaConf

    if OmegaConf.is_config(source):
        source = OmegaConf.to_object(source)
    nodes = list(source) if isinstance(source, list | tuple) else [source]
    if not nodes or any(node is None for node in nodes):
        raise ValueError(
            f"dataset.source is {source!r}; give it a data set builder, for example "
            "source: {_component_: torchtune.datasets.alpaca_cleaned_dataset}"
        )
    for node in nodes:
        if isinstance(node, Mapping):
            if not isinstance(node.get("_component_"), str):
                raise ValueError(
                    f"dataset.source has the keys {list(node)} but no _component_ with the dotted "
                    "path of a data set builder"
                )
        elif isinstance(node, str) or not hasattr(node, "__getitem__"):
            raise ValueError(
                f"dataset.source is {node!r}; it must be a config node with _component_, or a data "
                "set with samples of 'tokens' and 'labels'"
            )
    return nodes


def check_source(node: Any) -> None:
    """Refuses, by its name alone, a source that cannot be packed or that packs by itself.

    Args:
        node: a plain dict with ``_component_``; anything else passes.

    Raises:
        ValueError: the source packs, or yields preference or multimodal data, or a data file that
            it names does not exist.
    """
    if not isinstance(node, Mapping):
        return
    name = node["_component_"]
    if node.get("packed"):
        raise ValueError(
            f"dataset.source.packed is {node['packed']!r} for {name}: packed_dataset does the "
            "packing, so remove that key"
        )
    built_by = find_component(name, "dataset.source._component_")
    kind = _unpackable_kind(name, built_by)
    if kind:
        raise ValueError(
            f"dataset.source is {name}, which yields {kind}; only a builder for supervised "
            "finetuning or text completion can be packed"
        )
    for path in named_files(node):
        if not os.path.exists(path) and not glob.glob(path, recursive=True):
            raise ValueError(
                f"dataset.source.data_files names {path}, which does not exist in "
                f"{os.getcwd()}; correct the path"
            )


def load_source(nodes: Sequence[Any], tokenizer: Any) -> Any:
    """Builds the data sets of all nodes; several become one, in order.

    Args:
        nodes: what ``source_nodes`` returned.
        tokenizer: passed as the first argument to every builder.

    Raises:
        ValueError: a builder failed; the message names it and what it choked on.
    """
    tokenizer = with_exact_truncation(tokenizer)
    built = [_load(node, tokenizer) if isinstance(node, Mapping) else node for node in nodes]
    return built[0] if len(built) == 1 else ConcatDataset(built)


def named_files(node: Mapping[str, Any]) -> list[str]:
    """Local paths under ``data_files`` of a source node (URLs left out)."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            if "://" not in value:
                found.append(os.path.join(node.get("data_dir") or "", value))
        elif isinstance(value, Mapping):
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    if node.get("source") in (None, "json", "csv", "text", "parquet", "arrow", "pandas", "xml"):
        collect(node.get("data_files"))
    return found


def _unpackable_kind(name: str, built_by: Any) -> str | None:
    from torchtune.datasets import PreferenceDataset

    module = getattr(built_by, "__module__", "") or ""
    if "multimodal" in name or module.startswith("torchtune.datasets.multimodal"):
        return "multimodal samples"
    try:
        returns = inspect.signature(built_by).return_annotation
    except (TypeError, ValueError):
        returns = None
    if built_by is PreferenceDataset or returns is PreferenceDataset or "preference" in name:
        return "preference data (chosen and rejected answers)"
    if getattr(built_by, "__name__", "") in ("PackedDataset", "packed_dataset"):
        return "packs already"
    return None


def build_dataset(node: Any, tokenizer: Any, key: str = "dataset.source") -> Any:
    """Calls the builder that a node names.

    Args:
        node: mapping with a ``_component_``.
        tokenizer: the builder's first argument.
        key: where the node stands in the config, for the message.

    Raises:
        ValueError: the builder failed; the message says on what.
    """
    from omegaconf import OmegaConf
    from torchtune import config

    name = node["_component_"]
    try:
        return config.instantiate(
            OmegaConf.create(dict(node), flags={"allow_objects": True}), tokenizer
        )
    except Exception as error:
        bad_line = _first_bad_json_line(node)
        if bad_line:
            raise ValueError(bad_line) from error
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        message = (str(root).strip() or type(root).__name__).splitlines()[0]
        raise ValueError(
            f"{key} {name} could not be built ({type(root).__name__}: {message}); check "
            "its keys " + ", ".join(str(key) for key in node if key != "_component_")
        ) from error


def _load(node: Mapping[str, Any], tokenizer: Any) -> Any:
    name = node["_component_"]
    check_source(node)
    ds = build_dataset(node, tokenizer)
    if type(ds).__name__ == "PackedDataset" or type(ds).__name__ == "PreferenceDataset":
        raise ValueError(
            f"dataset.source {name} built a {type(ds).__name__}; packed_dataset needs the plain, "
            "unpacked data set for supervised finetuning"
        )
    _check_columns(name, ds)
    return ds


def _check_columns(name: str, ds: Any) -> None:
    """Reads one sample of a table, where a column that is named wrongly shows at once."""
    columns = getattr(getattr(ds, "_data", None), "column_names", None)
    if not columns or not len(ds):
        return
    try:
        ds[0]
    except KeyError as error:
        raise ValueError(
            f"dataset.source {name} asks its first sample for {error}, but the columns of the data "
            f"are {', '.join(map(str, columns))}; name yours in dataset.source.column_map (or "
            "dataset.source.column for plain text)"
        ) from error
    except Exception:
        return  # the same sample fails again where samples are read, and is named there


def _first_bad_json_line(node: Mapping[str, Any]) -> str | None:
    """Says which line of which file is not JSON, once loading has failed."""
    if node.get("source") != "json":
        return None
    for pattern in named_files(node):
        for path in glob.glob(pattern, recursive=True) or [pattern]:
            if os.path.splitext(path)[1] not in (".json", ".jsonl", ".ndjson", ".txt", ""):
                continue
            problem = _json_problem(path)
            if problem:
                return f"the data file {path} is not JSON: {problem}"
    return None


def _json_problem(path: str) -> str | None:
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    json.loads(line)
                except ValueError:
                    # Perhaps one document over many lines rather than one a line.
                    return _whole_file_problem(path, number, line)
    except UnicodeDecodeError:
        return f"line {number + 1} is not UTF-8 text"
    except OSError as error:
        return str(error)
    return None if number else "it is empty"


def _whole_file_problem(path: str, number: int, line: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            json.load(file)
    except ValueError:
        shown = line.strip()[:40]
        return f"line {number} starts with {shown!r}; expected one JSON object a line, or one list"
    return None
