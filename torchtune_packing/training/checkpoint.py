"""Checkpoints of a run that are whole or not there at all.

Each one is a folder ``<output_dir>/step_<n>``. It is written beside its final place, flushed to the
disk file by file, and only then renamed, so a kill at any moment leaves the last whole one:

    step_000012/
        model-00001-of-00001.safetensors   weights under Hugging Face names   (full finetuning)
        adapter_model.safetensors, .json   adapter in PEFT's format           (LoRA)
        adapter_model.pt                   adapter under torchtune's names    (LoRA)
        config.json, tokenizer.json, ...   copied from the base model's folder
        training_state.pt                  optimizer, schedule, random states
        training_state.json                position, fingerprints, config: readable by people

So a checkpoint of full finetuning is an ordinary model folder: transformers and torchtune load it
as it is. Nothing here executes code while loading: tensors are read with ``weights_only=True`` or
as safetensors, the rest is JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from torchtune_packing.store.files import sync_folder

__all__ = ["RunCheckpoints", "read_facts", "read_state", "write_state", "write_weights"]

STATE_JSON = "training_state.json"
STATE_TENSORS = "training_state.pt"
_STEP = re.compile(r"step_(\d+)")
_PARTIAL = ".partial"


class RunCheckpoints:
    """The ``step_<n>`` folders of one output folder.

    Args:
        output_dir: the run's folder.
        keep_last_n: how many to keep after a new one is whole; None keeps all.

    Raises:
        ValueError: if ``keep_last_n`` is less than 1.
    """

    def __init__(self, output_dir: str | Path, *, keep_last_n: int | None = None) -> None:
        if keep_last_n is not None and keep_last_n < 1:
            raise ValueError(
                f"keep_last_n_checkpoints is {keep_last_n}; it must be at least 1, or null for all."
            )
        self.output_dir = Path(output_dir)
        self.keep_last_n = keep_last_n
        self._lock = FileLock(self.output_dir / ".lock")

    def claim(self) -> None:
        """Takes the folder for this process; the lock falls with the process.

        Raises:
            ValueError: the folder cannot be made or written, or another run writes into it.
        """
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"`output_dir` {self.output_dir} is in use by another run; wait for its end, or "
                "choose another output_dir."
            ) from None
        except OSError as error:
            raise ValueError(
                f"`output_dir` is {self.output_dir}, which cannot be written ({error.strerror}); "
                "choose another output_dir."
            ) from error

    def release(self) -> None:
        """Gives the folder free."""
        self._lock.release()

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        if not self.output_dir.is_dir():
            return []
        found = [p for p in self.output_dir.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()]
        return sorted(found, key=lambda p: int(p.name.split("_")[1]))

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        whole = [p for p in self.all() if (p / STATE_JSON).is_file()]
        return whole[-1] if whole else None

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Makes the checkpoint of a step: aside, flushed, renamed; then drops the oldest.

        Args:
            step: optimizer steps done.
            fill: writes the files into the folder it is given.

        Returns:
            The folder under its final name.
        """
        final = self.output_dir / f"step_{step:06d}"
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for left_over in self.output_dir.glob(f"step_*{_PARTIAL}"):
            shutil.rmtree(left_over)
        partial = self.output_dir / f"{final.name}{_PARTIAL}"
        partial.mkdir()
        fill(partial)
        _flush(partial)
        if final.exists():  # the same step again: at no moment is there neither the old nor the new
            replaced = self.output_dir / f"{final.name}.replaced{_PARTIAL}"
            final.rename(replaced)
            partial.rename(final)
            shutil.rmtree(replaced)
        else:
            partial.rename(final)
        sync_folder(self.output_dir)
        if self.keep_last_n is not None:
            for old in self.all()[: -self.keep_last_n]:
                shutil.rmtree(old)
        return final

    def clear(self) -> list[Path]:
        """Removes the checkpoints of an earlier run in this folder; returns what was removed."""
        found = [*self.all(), *self.output_dir.glob(f"step_*{_PARTIAL}")]
        for folder in found:
            shutil.rmtree(folder)
        return found


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def write_state(folder: Path, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Writes the training state: tensors for torch, facts as JSON that people can read.

    Args:
        folder: the checkpoint being made.
        tensors: optimizer, schedule and random states; plain containers of tensors and numbers.
        facts: position, fingerprints, config.
    """
    torch.save(dict(tensors), folder / STATE_TENSORS)
    (folder / STATE_JSON).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def read_facts(folder: Path) -> dict[str, Any]:
    """Reads the readable part of a checkpoint only: position, fingerprints, config."""
    try:
        return json.loads((folder / STATE_JSON).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / STATE_JSON} cannot be read as JSON ({error}); remove {folder} to resume "
            "from the checkpoint before it."
        ) from error


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads what ``write_state`` wrote, without executing anything.

    Returns:
        The tensors and the facts.

    Raises:
        ValueError: if a file is missing or cannot be read, naming it and what was expected.
    """
    for name in (STATE_JSON, STATE_TENSORS):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} is no checkpoint of these recipes: {name} is missing (expected a "
                "step_<n> folder written by save_every_n_steps); remove the folder or start anew."
            )
    facts = read_facts(folder)
    try:
        tensors = torch.load(folder / STATE_TENSORS, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"{folder / STATE_TENSORS} cannot be read as plain tensors: {error}. Remove {folder} "
            "to resume from the checkpoint before it."
        ) from error
    return tensors, facts


@contextmanager
def _quiet_logger(name: str) -> Any:
    # The checkpointer reports the staging paths, which exist for a moment only.
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def write_weights(
    checkpointer: Any, folder: Path, state: dict[str, Any], *, adapter_only: bool = False
) -> None:
    """Lets a torchtune checkpointer write weights or an adapter straight into a folder.

    torchtune 0.6.1 writes to ``<its output folder>/epoch_<n>``; here that is pointed into the
    checkpoint being made and the files are moved up.

    Args:
        checkpointer: a torchtune checkpointer whose ``load_checkpoint`` has run.
        folder: where the files go; exists.
        state: ``{"model": ..., "adapter": ..., "adapter_config": ...}`` as torchtune has it.
        adapter_only: leave the full weights out.
    """
    own_folder = checkpointer._output_dir
    checkpointer._output_dir = folder
    try:
        with _quiet_logger("torchtune.utils._logging"):
            checkpointer.save_checkpoint(state, epoch=0, adapter_only=adapter_only)
    finally:
        checkpointer._output_dir = own_folder
    nested = folder / "epoch_0"
    for path in nested.iterdir():
        path.rename(folder / path.name)
    nested.rmdir()
