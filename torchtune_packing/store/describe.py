"""Describes Python objects by what they do, so that a key changes when their output may change.

A tokenizer is described by its class, the code of that class, and its state: vocabularies and
merges by content, whatever file they came from. Code inside an installed distribution counts as its
name and version, any other code as the hash of its file. What cannot be described raises; nothing
is guessed.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
import re
import sys
import sysconfig
import types
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["canonical", "code_of", "describe", "file_digest", "sha256_of"]

#: Longer descriptions are replaced by their hash, so that ``meta.json`` stays readable.
_MAX_SHOWN = 2000


def describe(value: Any, _seen: tuple[int, ...] = ()) -> Any:
    """Returns a JSON-able description of a value that is equal for values that behave alike.

    Args:
        value: anything that a config or a tokenizer may hold.

    Raises:
        ValueError: the value, or something inside it, cannot be looked into.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in _seen:
        return "<itself>"
    return _short(_describe(value, (*_seen, id(value))))


def _describe(value: Any, seen: tuple[int, ...]) -> Any:
    known = _describe_known(value)
    if known is not None:
        return known
    if isinstance(value, Mapping):
        pairs = [[describe(key, seen), describe(item, seen)] for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs):
            return dict(pairs)
        return {"mapping": sorted(pairs, key=canonical)}
    if isinstance(value, list | tuple):
        return [describe(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((describe(item, seen) for item in value), key=canonical)}
    if isinstance(value, functools.partial):
        return {
            "partial": describe(value.func, seen),
            "args": describe(value.args, seen),
            "keywords": describe(value.keywords, seen),
        }
    if isinstance(value, types.MethodType):
        return {"method": value.__func__.__qualname__, "of": describe(value.__self__, seen)}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _describe_code(value, seen)
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__, "code": code_of(value)}
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None and callable(value):
        return describe(wrapped, seen)
    return _describe_object(value, seen)


def _describe_known(value: Any) -> Any:
    """Leaves, and objects of compiled libraries that can tell their content."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": sha256_of(bytes(value))}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, re.Pattern):
        return {"regex": str(value.pattern), "flags": value.flags}
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        content = np.ascontiguousarray(value).tobytes()
        return {"array": str(value.dtype), "shape": list(value.shape), "sha256": sha256_of(content)}
    if isinstance(value, torch.dtype | torch.device | range | slice | complex):
        return repr(value)
    return _describe_library_object(value)


def _describe_library_object(value: Any) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "tiktoken.core.Encoding":
        ranks = sorted(value._mergeable_ranks.items())
        return {
            "tiktoken": value.name,
            "pattern": value._pat_str,
            "ranks": sha256_of(repr(ranks).encode()),
            "special": sorted(value._special_tokens.items()),
        }
    if kind.startswith("sentencepiece") and hasattr(value, "serialized_model_proto"):
        return {"sentencepiece": sha256_of(value.serialized_model_proto())}
    if kind == "tokenizers.Tokenizer":
        return {"tokenizers": sha256_of(value.to_str().encode())}
    if kind.startswith("transformers.") and hasattr(value, "backend_tokenizer"):
        state = [value.backend_tokenizer.to_str(), getattr(value, "chat_template", None)]
        return {kind: sha256_of(canonical(state).encode()), "from": describe(type(value))}
    if kind.startswith("datasets.") and isinstance(getattr(value, "_fingerprint", None), str):
        return {"datasets": value._fingerprint}
    if kind in ("_regex.Pattern", "regex.Pattern"):
        return {"regex": str(value.pattern), "flags": value.flags}
    return None


def _describe_code(value: Any, seen: tuple[int, ...]) -> Any:
    described: dict[str, Any] = {
        "code": f"{value.__module__}.{value.__qualname__}",
        "from": code_of(value),
    }
    if isinstance(value, types.FunctionType):
        # Tells apart two lambdas of one file, and what was bound when a function was made.
        described["line"] = value.__code__.co_firstlineno
        described["bytecode"] = sha256_of(value.__code__.co_code)
        described["defaults"] = describe([value.__defaults__, value.__kwdefaults__], seen)
        cells = value.__closure__ or ()
        described["closure"] = [describe(cell.cell_contents, seen) for cell in cells]
    return described


def _describe_object(value: Any, seen: tuple[int, ...]) -> Any:
    state: dict[str, Any] = {}
    for name in _slots(type(value)):
        if hasattr(value, name):
            state[name] = getattr(value, name)
    state.update(getattr(value, "__dict__", {}))
    if not state and not hasattr(value, "__dict__") and not _slots(type(value)):
        raise ValueError(
            f"a key cannot be computed over a {type(value).__module__}.{type(value).__qualname__}, "
            "which does not show its state; give cache_key a name that you change whenever the "
            "tokens change"
        )
    described = {"object": describe(type(value), seen)}
    for name, item in sorted(state.items()):
        if not _is_scratch(type(value), name):
            described[name] = describe(item, seen)
    return described


def _is_scratch(kind: type, name: str) -> bool:
    """True for attributes that fill up while an object is used and do not change what it does.

    Those are cached properties and whatever is called a cache. A key must not depend on whether a
    tokenizer was used before it was asked for.
    """
    if isinstance(getattr(kind, name, None), functools.cached_property):
        return True
    bare = name.strip("_").lower()
    return bare == "cache" or bare.endswith("_cache") or name == "__orig_class__"


def _slots(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


@functools.cache
def code_of(value: Any) -> str:
    """Names the code that defines a class, function or module, with its version.

    Returns:
        ``"<distribution> <version>"`` for installed code, ``"python"`` for the standard library,
        ``"sha256:..."`` of the source file for everything else.
    """
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        # Built-in, or typed into a session: then the source text, where there is one.
        try:
            return "sha256:" + sha256_of(inspect.getsource(value).encode())
        except (OSError, TypeError):
            return "builtin"
    path = Path(file).resolve()
    installed = any(part in ("site-packages", "dist-packages") for part in path.parts)
    if not installed:
        library = Path(sysconfig.get_paths()["stdlib"]).resolve()
        return "python" if path.is_relative_to(library) else "sha256:" + file_digest(path)
    top = module.__name__.partition(".")[0]
    try:
        return f"{top} {version(top)}"
    except PackageNotFoundError:
        found = getattr(sys.modules.get(top), "__version__", None)
        return f"{top} {found}" if found else "sha256:" + file_digest(path)


def file_digest(path: str | Path) -> str:
    """sha256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sha256_of(content: bytes) -> str:
    """sha256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def canonical(described: Any) -> str:
    """One spelling of a JSON-able value, for hashing and sorting."""
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def _short(described: Any) -> Any:
    if isinstance(described, dict | list) and len(described) > 8:
        text = canonical(described)
        if len(text) > _MAX_SHOWN:
            return {"entries": len(described), "sha256": sha256_of(text.encode())}
    return described
