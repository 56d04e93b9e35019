"""The dotted path behind a ``_component_``: imported, or refused in one sentence."""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType
from typing import Any

__all__ = ["find_component"]


def find_component(path: str, key: str) -> Any:
    """Imports what a dotted path names.

    Args:
        path: for example ``torch.optim.AdamW``.
        key: the key of the config that holds it, for the message.

    Returns:
        The class or function.

    Raises:
        ValueError: nothing has that name; the message names the part that is missing and, where
            there is one, a name close to it.
    """
    found: Any = None
    parts = path.split(".")
    for index, part in enumerate(parts):
        known = ".".join(parts[:index])
        if isinstance(found, ModuleType) or found is None:
            if hasattr(found, part):
                found = getattr(found, part)
                continue
            module = ".".join(parts[: index + 1])
            try:
                found = importlib.import_module(module)
                continue
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise ValueError(
                        f"`{key}` is {path}, which needs the package {error.name}; install it, or "
                        "name another component."
                    ) from error
            except (ImportError, OSError, TypeError, ValueError) as error:
                line = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ValueError(f"`{key}` is {path}, which cannot be imported: {line}") from error
        elif hasattr(found, part):
            found = getattr(found, part)
            continue
        if found is None:
            raise ValueError(
                f"`{key}` is {path}, but no package {part} is installed here; install it, or "
                "correct the name."
            )
        close = difflib.get_close_matches(part, dir(found), n=1)
        hint = f"did you mean {known}.{close[0]}?" if close else "correct the name."
        raise ValueError(f"`{key}` is {path}, but {known} has no {part}; {hint}")
    return found
