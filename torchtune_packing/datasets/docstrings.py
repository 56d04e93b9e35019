"""A real data set on every machine: the documented functions of Python's standard library.

The prompt is a function's source without its docstring and is not trained; the answer is the
docstring. The source files of the running Python are read and parsed, never imported.
"""

import ast
import gc
import hashlib
import inspect
import os
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torchtune.data import Message
from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchtune_packing.types import IGNORE_INDEX, Sample

#: Kept short, because every sample carries it.
SYSTEM_MESSAGE = "Write the docstring."

#: Share of the function names, in per cent, that goes to the validation split.
VALIDATION_PERCENT = 8

# Tests, bundled third-party packages, tables without documented functions, and what is no part of
# the library proper.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_bundled",
        "dist-packages",
        "encodings",
        "idle_test",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


class Function(NamedTuple):
    """One documented function: its dotted name, its source without docstring, its docstring."""

    name: str
    source: str
    docstring: str


class PythonDocstringsDataset:
    """Map-style data set of documented functions, tokenized when a sample is asked for.

    Args:
        functions: the functions, in the order of the data set.
        tokenizer: torchtune model tokenizer.
    """

    def __init__(self, functions: list[Function], tokenizer: ModelTokenizer) -> None:
        self.functions = functions
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.functions)

    def __getitem__(self, index: int) -> Sample:
        answer = Message(role="assistant", content=self.functions[index].docstring)
        tokens, mask = self.tokenizer.tokenize_messages([*self.messages(index), answer])
        labels = [
            IGNORE_INDEX if masked else token for token, masked in zip(tokens, mask, strict=True)
        ]
        return {"tokens": tokens, "labels": labels}

    def messages(self, index: int) -> list[Message]:
        """The prompt of a sample: what a model is shown before it writes the docstring."""
        return [
            Message(role="system", content=SYSTEM_MESSAGE, masked=True, eot=False),
            Message(role="user", content=self.functions[index].source, masked=True),
        ]

    def example(self, index: int) -> tuple[str, str]:
        """Source without docstring, and docstring, of a sample as plain text."""
        _, source, docstring = self.functions[index]
        return source, docstring


def python_docstrings_dataset(
    tokenizer: ModelTokenizer,
    *,
    split: str = "train",
    max_tokens: int | None = None,
    limit: int | None = None,
) -> PythonDocstringsDataset:
    """Builds the data set of the running Python's documented standard library functions.

    Order and split depend on the installed library alone. The split goes by a function's own name
    (``close``, not ``socket.socket.close``), so that no name is in both.

    Args:
        tokenizer: torchtune model tokenizer.
        split: ``"train"`` or ``"validation"`` (about 8 % of the names).
        max_tokens: leave out samples of more tokens than this. None: keep all.
        limit: take the first ``limit`` samples only. None: take all.

    Raises:
        ValueError: if the split is unknown, a number is less than 1, or nothing is left.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}; choose 'train' or 'validation'.")
    for name, value in (("max_tokens", max_tokens), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1, or None for no limit.")
    functions = [f for f in stdlib_functions() if in_validation(f.name) == (split == "validation")]
    dataset = PythonDocstringsDataset(functions, tokenizer)
    if max_tokens is not None:
        kept: list[Function] = []
        for index, function in enumerate(functions):
            if len(kept) == limit:
                break
            if len(dataset[index]["tokens"]) <= max_tokens:
                kept.append(function)
        dataset.functions = kept
    if limit is not None:
        dataset.functions = dataset.functions[:limit]
    if not dataset.functions:
        raise ValueError(
            f"No documented function is left in the {split} split with max_tokens={max_tokens}; "
            "raise max_tokens, or check that this Python carries its library as source files."
        )
    return dataset


def in_validation(name: str) -> bool:
    """Whether a function belongs to the validation split, by the last part of its dotted name."""
    digest = hashlib.sha256(name.rpartition(".")[2].encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < VALIDATION_PERCENT


@lru_cache(maxsize=2)
def stdlib_functions(root: str | None = None) -> tuple[Function, ...]:
    """All documented functions and methods of the standard library, once each.

    Args:
        root: folder of the library's source files; None: that of the running Python.

    Returns:
        The functions by file and line. Two with the same source and docstring count as one.
    """
    folder = Path(root or sysconfig.get_paths()["stdlib"])
    found: dict[tuple[str, str], Function] = {}
    with _collector_paused():
        for file in _source_files(folder):
            module = ".".join(file.relative_to(folder).with_suffix("").parts)
            for function in _documented(file, module.removesuffix(".__init__")):
                found.setdefault((function.source, function.docstring), function)
    return tuple(found.values())


def _source_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        )
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(parent, name)


def _documented(file: Path, module: str) -> list[Function]:
    """The documented functions of one file in the order of its lines, nested ones included."""
    try:
        with tokenize.open(file) as stream:
            text = stream.read()
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return []  # a template, or a file for another Python version
    lines = text.split("\n")
    found: list[Function] = []
    waiting: list[tuple[str, ast.AST]] = [(module, tree)]
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
            if docstring:
                found.append(Function(name, _without_docstring(node, lines), docstring))
        for child in reversed(_statements(node)):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                waiting.append((f"{name}.{child.name}", child))
            else:
                waiting.append((name, child))
    return found


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keeps Python's cycle collector from visiting growing syntax trees: half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _statements(node: ast.AST) -> list[ast.AST]:
    """The statements directly inside a node. No expression can hold a ``def``."""
    parts = ("body", "handlers", "orelse", "finalbody", "cases")
    return [child for part in parts for child in getattr(node, part, ())]


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """The source of a documented function, decorators included, with its docstring cut out."""
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    doc = node.body[0]
    assert doc.end_lineno is not None and doc.end_col_offset is not None
    # ast counts columns in bytes.
    before = lines[doc.lineno - 1].encode()[: doc.col_offset].decode()
    after = lines[doc.end_lineno - 1].encode()[doc.end_col_offset :].decode()
    if len(node.body) == 1:
        middle = [f"{before}pass{after}"]
    elif before.strip() or after.strip():
        middle = [before + after.lstrip(" ;")]
    else:
        middle = []
    kept = lines[start - 1 : doc.lineno - 1] + middle + lines[doc.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(line.rstrip() for line in kept)).strip()
