"""Lists the recipes and configs, and copies one out to edit.

Usage:

    python -m torchtune_packing ls
    python -m torchtune_packing cp recipes/full_finetune.py my_recipe.py
    python -m torchtune_packing cp configs/llama3_2/1B_lora.yaml my_config.yaml
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the commands.

    Args:
        arguments: command line without the program's name; None takes that of this process.

    Returns:
        Exit status: 0, or 1 when a name is unknown or a file is in the way.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_packing", description="Recipes and configs of torchtune_packing."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ls", help="list recipes and configs")
    copy = commands.add_parser("cp", help="copy a recipe or a config out, to edit it")
    copy.add_argument("name", help="as `ls` shows it; folder and ending may be left out")
    copy.add_argument("destination", type=Path, help="a file, or a folder that exists")
    copy.add_argument("--force", action="store_true", help="replace a file that exists")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "ls":
            lines = _listing(shutil.get_terminal_size().columns)
        else:
            lines = _copy(chosen.name, chosen.destination, force=chosen.force)
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # The reader has seen enough (`ls | head -1`); what the exit still flushes goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _root() -> tuple[Path, bool]:
    """The folder of ``recipes`` and ``configs``, and whether it is an installed package.

    A wheel holds both inside the package, since torchtune installs a top-level ``recipes``; in a
    checkout they lie beside it.
    """
    package = Path(__file__).resolve().parent
    installed = (package / "recipes").is_dir()
    return (package if installed else package.parent), installed


def _recipes() -> dict[str, Path]:
    found = sorted((_root()[0] / "recipes").glob("*.py"))
    return {path.stem: path for path in found if path.stem != "__init__"}


def _configs() -> dict[str, Path]:
    root = _root()[0] / "configs"
    return {
        path.relative_to(root).with_suffix("").as_posix(): path
        for path in sorted(root.rglob("*.yaml"))
    }


def _listing(columns: int) -> list[str]:
    """Recipes and configs with a sentence on each, in lines of so many columns."""
    described = []
    for path in _recipes().values():
        first = re.match(r'"""(.*)', path.read_text(encoding="utf-8"))
        described.append((path, first[1].rstrip() if first else ""))
    for path in _configs().values():
        head = path.read_text(encoding="utf-8").splitlines()[:2]
        text = " ".join(line.removeprefix("#").strip() for line in head)
        # The first sentence; a point inside a version number ends none.
        described.append((path, re.split(r"[.:] (?=[A-Z]|$)", text + " ")[0].strip(". ")))
    # As `tune run` takes them: in a checkout from its folder, a recipe of a wheel from anywhere.
    beside = Path(__file__).resolve().parent.parent
    lines = []
    for path, text in described:
        lines.append(path.relative_to(beside).as_posix())
        lines += textwrap.wrap(text, columns, initial_indent="    ", subsequent_indent="    ")
    return [*lines, "", "To copy one out and edit it: python -m torchtune_packing cp <name> <file>"]


def _copy(name: str, destination: Path, *, force: bool) -> list[str]:
    """Copies one file; returns the lines that say how it is run."""
    found = {**_recipes(), **_configs()}
    key = re.sub(r"^(torchtune_packing/)?(recipes/|configs/)?|\.(py|yaml)$", "", name)
    if key not in found:
        raise ValueError(
            f"there is no recipe or config {name!r}; `python -m torchtune_packing ls` lists them"
        )
    source = found[key]
    if destination.is_dir():
        destination = destination / source.name
    if destination.suffix != source.suffix:
        raise ValueError(
            f"the copy of {key} is to be called {destination}, but `tune run` needs a name that "
            f"ends in {source.suffix}; give it one, or name a folder that exists"
        )
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists; choose another name, or add --force to replace it")
    text = source.read_text(encoding="utf-8")
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".py":
        destination.write_text(text, encoding="utf-8")
        return [f"copied to {destination}", _command_for(destination)]
    text = _with_commands_for(text, key, destination)
    destination.write_text(text, encoding="utf-8")
    commands = [line.lstrip("# ") for line in text.splitlines() if re.match(r"#.* tune run ", line)]
    return [f"copied to {destination}", *(f"run it: {command}" for command in commands)]


def _command_for(recipe: Path) -> str:
    """How a copied recipe is run: torchtune takes its path from the working folder down only."""
    path, folder = recipe.resolve(), Path.cwd()
    where = ""
    if not path.is_relative_to(folder):
        folder = path.parent
        where = f" in {folder}"
    return f"run it{where}: tune run {path.relative_to(folder)} --config <config>"


def _with_commands_for(text: str, key: str, destination: Path) -> str:
    """A config whose commands at the top name the copy, and the recipes where they are."""
    text = text.replace(f"configs/{key}.yaml", destination.as_posix())
    if _root()[1]:
        text = re.sub(r"^(#.*)PYTHONPATH=\. tune run", r"\1tune run", text, flags=re.MULTILINE)
        text = re.sub(r"^(#.* )(recipes/\w+\.py)", r"\1torchtune_packing/\2", text, flags=re.M)
    return text


if __name__ == "__main__":
    sys.exit(main())
