"""How a refusal reaches the user: one sentence on stderr, exit code 1, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from torchtune_packing.store.ingest import SampleReadError

__all__ = ["explained", "require_config_file"]


@contextmanager
def explained() -> Iterator[None]:
    """Turns a refusal during set-up into one sentence on stderr and exit code 1.

    ``TORCHTUNE_PACKING_TRACEBACK=1`` shows the traceback instead. In a run of several processes
    only the first one speaks, since all of them refuse alike.
    """
    try:
        yield
    except (ValueError, OSError, SampleReadError, yaml.YAMLError) as error:
        if os.environ.get("TORCHTUNE_PACKING_TRACEBACK"):
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def require_config_file(arguments: Sequence[str]) -> None:
    """Refuses a ``--config`` that is no file or no YAML, before torchtune's parser meets it."""
    if "--config" not in arguments[:-1]:
        return
    path = Path(arguments[arguments.index("--config") + 1])
    with explained():
        if not path.is_file():
            raise ValueError(
                f"--config is {path}, which is no file; `python -m torchtune_packing ls` lists the "
                "configs that come with the package, and `cp` in place of `ls` copies one out."
            )
        try:
            OmegaConf.load(path)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
