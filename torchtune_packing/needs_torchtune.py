"""Imported before anything that needs torchtune: says in one sentence what is wrong with it.

torchtune fails in many ways when torch, torchao and torchtune do not fit together, and most of them
blame something else: a name that has moved, an operator that is not registered.
"""

from importlib.metadata import PackageNotFoundError, version

#: The versions that the tests run with, and those that pyproject.toml allows.
TESTED = {
    "torchtune": "0.6.1 (only this one)",
    "torchao": "0.13.0 (0.13 to 0.15)",
    "torch": "2.13.0 (2.9 or newer)",
}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _check() -> None:
    try:
        import torchtune  # noqa: F401
    except Exception as error:
        versions = "; ".join(
            f"{name} is {_installed(name)}, tested with {tested}" for name, tested in TESTED.items()
        )
        raise ImportError(
            f"torchtune cannot be imported: {' '.join(str(error).split())} ({versions}). "
            "Install the tested versions, for example with: "
            "pip install torchtune==0.6.1 torchao==0.13.0"
        ) from error


_check()
