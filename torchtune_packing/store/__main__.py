"""Looks after the stores of a folder.

Usage:

    python -m torchtune_packing.store ls STORE_OR_CACHE_DIR
    python -m torchtune_packing.store verify STORE_OR_CACHE_DIR
    python -m torchtune_packing.store rm STORE [STORE ...]
    python -m torchtune_packing.store rm --partial CACHE_DIR
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtune_packing.store.cache import check_removable, remove_store, store_folders
from torchtune_packing.store.files import StoreError, partial_folders
from torchtune_packing.store.token_store import TokenStore


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the commands.

    Args:
        arguments: command line without the program's name; None takes that of this process.

    Returns:
        Exit status: 0, or 1 when something is damaged or cannot be done.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_packing.store", description="Token stores of a cache_dir."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("ls", help="list the stores of a folder and their sizes")
    listing.add_argument("folder", type=Path)
    verify = commands.add_parser("verify", help="compare every array with its checksum")
    verify.add_argument("folder", type=Path, nargs="+", help="a store, or a folder of stores")
    remove = commands.add_parser("rm", help="remove stores")
    remove.add_argument("folder", type=Path, nargs="+")
    remove.add_argument(
        "--partial",
        action="store_true",
        help="remove what killed builds left in a cache_dir instead (no build may be running)",
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "ls":
            return _list(chosen.folder)
        if chosen.command == "verify":
            return _verify(chosen.folder)
        return _remove(chosen.folder, chosen.partial)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _list(root: Path) -> int:
    status = 0
    stores = _stores(root)
    print(f"{'samples':>12} {'tokens':>16} {'MB':>10}  store")
    for folder in stores:
        try:
            store = TokenStore.open(folder)
        except (StoreError, PermissionError) as error:
            print(f"{'damaged':>12} {'':>16} {_megabytes(folder):>10,.1f}  {folder.name}: {error}")
            status = 1
            continue
        counts = store.accounting
        print(
            f"{counts.num_samples:>12,} {counts.num_tokens:>16,} {_megabytes(folder):>10,.1f}  "
            f"{folder.name}"
        )
    for folder in partial_folders(root):
        print(f"{'unfinished':>12} {'':>16} {_megabytes(folder):>10,.1f}  {folder.name}")
    return status


def _verify(folders: Sequence[Path]) -> int:
    status = 0
    for given in folders:
        stores = _stores(given)
        if not stores:
            raise ValueError(f"{given} holds no token store")
        for folder in stores:
            try:
                TokenStore.open(folder).verify()
            except (StoreError, PermissionError) as error:
                print(f"damaged  {folder}: {error}")
                status = 1
            else:
                print(f"ok       {folder}")
    return status


def _remove(folders: Sequence[Path], partial: bool) -> int:
    # All are looked at before the first one goes.
    for folder in folders:
        if partial:
            _stores(folder)
        else:
            check_removable(folder)
    for folder in folders:
        if not partial:
            remove_store(folder)
            print(f"removed {folder}")
            continue
        for leftover in partial_folders(folder):
            shutil.rmtree(leftover)
            print(f"removed {leftover}")
    return 0


def _stores(given: Path) -> list[Path]:
    """The store that is named, or all of a folder."""
    return [given] if (given / "meta.json").exists() else store_folders(given)


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
