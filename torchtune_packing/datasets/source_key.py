"""The key of a store that a config describes: everything that changes the tokens, nothing else.

In the key: every setting of the source, the content of the local files that it names, the revision
of a hub data set, the code of the builders, the tokenizer with its vocabulary, template and limits,
label shifting, library versions. Not in the key: ``max_seq_len`` of the packs, strategy, overlong
policy, seed, ranks, workers, and where files lie.
"""

from __future__ import annotations

import glob
import inspect
import json
import logging
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torchtune_packing
from torchtune_packing.components import find_component
from torchtune_packing.datasets.sources import named_files
from torchtune_packing.store.describe import canonical, describe, file_digest, sha256_of
from torchtune_packing.store.files import FORMAT

__all__ = ["source_key"]

logger = logging.getLogger(__name__)

_LIBRARIES = ("torchtune", "tokenizers", "sentencepiece", "tiktoken", "datasets")
#: ``source`` values of ``datasets.load_dataset`` that read files rather than a repository.
_READERS = {"json", "csv", "text", "parquet", "arrow", "pandas", "xml", "webdataset"}
#: Settings whose value is never a path, even where a file of that name happens to exist.
_NEVER_PATHS = {"_component_", "split", "name", "revision", "column", "conversation_style"}
_PATH_KEYS = {"data_files", "data_dir", "source", "path", "files"}
#: Hashes of files at least this large are remembered between starts.
_REMEMBER_FROM = 1 << 24


def source_key(
    nodes: Sequence[Any],
    tokenizer: Any,
    *,
    labels_are_shifted: bool,
    cache_dir: str | Path | None = None,
) -> tuple[str, dict[str, Any]]:
    """Computes the key of a store from its config, without loading the data.

    Args:
        nodes: the sources, as from ``source_nodes``.
        tokenizer: the built tokenizer.
        labels_are_shifted: the source's labels are targets.
        cache_dir: where hashes of large files are remembered.

    Returns:
        The key, and what it was made of.

    Raises:
        ValueError: something in the source or the tokenizer cannot be described.
    """
    digests = _Digests(cache_dir)
    fingerprint = {
        "format": FORMAT,
        "source": [_describe_node(node, digests) for node in nodes],
        "tokenizer": describe(tokenizer),
        "labels_are_shifted": labels_are_shifted,
        "versions": _versions(nodes),
    }
    digests.save()
    first = nodes[0]
    name = first["_component_"] if isinstance(first, Mapping) else type(first).__name__
    name = re.sub(r"[^A-Za-z0-9_]", "", name.rpartition(".")[2]) or "source"
    return f"{name[:60]}-{sha256_of(canonical(fingerprint).encode())[:20]}", fingerprint


def _versions(nodes: Sequence[Any]) -> dict[str, str]:
    found = {"torchtune_packing": torchtune_packing.__version__}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    # These documents are the running Python's own library.
    if any("python_docstrings" in str(node) for node in nodes if isinstance(node, Mapping)):
        found["python"] = platform.python_version()
    return found


def _describe_node(node: Any, digests: _Digests) -> Any:
    if not isinstance(node, Mapping):
        return describe(node)
    built_by = find_component(node["_component_"], "dataset.source._component_")
    described = {"builder": describe(built_by), "defaults": _defaults(built_by, node)}
    paths = {os.path.normpath(path) for path in named_files(node)}
    data_dir = node.get("data_dir") or ""
    described["keys"] = _replace_paths(dict(node), "", paths, data_dir, digests)
    revision = _hub_revision({**described["defaults"], **node})
    if revision:
        described["revision"] = revision
    return described


def _defaults(built_by: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(built_by).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        parameter.name: describe(parameter.default)
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty and parameter.name not in node
    }


def _replace_paths(value: Any, key: str, named: set[str], data_dir: str, digests: _Digests) -> Any:
    """The node's settings with every local path replaced by the content that lies there."""
    if isinstance(value, Mapping):
        return {
            str(name): _replace_paths(
                item, name if key != "data_files" else key, named, data_dir, digests
            )
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_paths(item, key, named, data_dir, digests) for item in value]
    if not isinstance(value, str):
        return describe(value)
    if key in _NEVER_PATHS or "://" in value:
        return value
    for path in (os.path.join(data_dir, value), value):
        looks_like_path = key in _PATH_KEYS or os.sep in value or "." in value
        is_named = os.path.normpath(path) in named
        if (looks_like_path or is_named) and (os.path.exists(path) or glob.has_magic(path)):
            content = digests.content(path)
            if content:
                return {"content": content}
    return value


class _Digests:
    """sha256 of files; those of large files are kept in ``cache_dir`` by size and time."""

    def __init__(self, cache_dir: str | Path | None) -> None:
        self._file = None
        if cache_dir is not None:
            self._file = Path(cache_dir).expanduser() / ".digests.json"
        self._known: dict[str, list[Any]] = {}
        self._changed = False
        if self._file is not None and self._file.is_file():
            try:
                self._known = json.loads(self._file.read_text())
            except (OSError, ValueError):
                self._known = {}

    def content(self, path: str) -> dict[str, str] | list[list[str]]:
        """Names and sha256 of a file, of all files below a folder, or of those of a pattern."""
        if os.path.isfile(path):
            return {os.path.basename(path): self._digest(path)}
        if os.path.isdir(path):
            files = sorted(file for file in Path(path).rglob("*") if file.is_file())
            return {str(file.relative_to(path)): self._digest(str(file)) for file in files}
        # A pattern may match files of one name in several folders, so no dict.
        found = filter(os.path.isfile, sorted(glob.glob(path, recursive=True)))
        return [[os.path.basename(file), self._digest(file)] for file in found]

    def _digest(self, path: str) -> str:
        real = os.path.realpath(path)
        status = os.stat(real)
        stamp = [status.st_size, status.st_mtime_ns]
        known = self._known.get(real)
        if known is not None and known[:2] == stamp:
            return str(known[2])
        digest = file_digest(real)
        # A file written a moment ago may change again within the clock's step.
        if status.st_size >= _REMEMBER_FROM and time.time() - status.st_mtime > 2:
            self._known[real] = [*stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Writes what was learned; a folder that cannot be written costs time, not correctness."""
        if self._file is None or not self._changed:
            return
        aside = self._file.with_name(f".digests-{os.getpid()}.json")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(self._known))
            os.replace(aside, self._file)
        except OSError:
            aside.unlink(missing_ok=True)


def _hub_revision(settings: Mapping[str, Any]) -> str | None:
    """Commit of the hub repository that the source reads, None when it reads none."""
    source = settings.get("source")
    if not isinstance(source, str) or source in _READERS or os.path.exists(source):
        return None
    if "://" in source or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        return None
    wanted = settings.get("revision") or "main"
    if re.fullmatch(r"[0-9a-f]{40}", wanted):
        return wanted
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:
            found = HfApi().dataset_info(source, revision=wanted, timeout=10).sha
            if found:
                return found
        except Exception as error:  # no network, private, or not on the hub: the copy here decides
            logger.debug("The hub did not tell the revision of %s: %s", source, error)
    folder = "datasets--" + source.replace("/", "--")
    reference = Path(constants.HF_HUB_CACHE) / folder / "refs" / wanted
    if reference.is_file():
        return reference.read_text().strip()
    logger.warning(
        "The revision of %s is not known, so a change of that data set at the hub will not be "
        "noticed; set revision in dataset.source.",
        source,
    )
    return "unknown"
