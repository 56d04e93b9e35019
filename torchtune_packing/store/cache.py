"""One build per key and node: who builds, who waits, and what is taken for granted.

Every process asks for the store by its key. The first one takes a file lock and builds; the others
wait on that lock, which no time limit of a process group can end, and then open the same files. The
lock belongs to the process, so the operating system frees it when a builder is killed.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torchtune_packing
from torchtune_packing.store.describe import canonical, describe, sha256_of
from torchtune_packing.store.files import FILE_NAMES, StoreError, partial_folders
from torchtune_packing.store.token_store import TokenStore

__all__ = [
    "build_lock",
    "check_against",
    "check_cache_arguments",
    "check_num_workers",
    "check_removable",
    "check_shift",
    "open_or_build",
    "own_key",
    "remove_store",
    "store_folders",
    "store_meta",
    "store_path",
    "try_open",
]

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,150}")
#: Libraries whose version is noted in ``meta.json``.
_NOTED = ("torch", "numpy", "torchtune", "tokenizers", "sentencepiece", "tiktoken", "datasets")


def check_cache_arguments(cache_dir: Any, cache_key: str | None) -> None:
    """Checks that a key, where there is one, can name a folder.

    Raises:
        ValueError: it cannot, or there is a key but no folder to keep stores in.
    """
    if cache_key is None:
        return
    if cache_dir is None:
        raise ValueError(
            f"cache_key={cache_key!r} names a store, but there is no cache_dir to keep it in; set "
            "cache_dir or leave cache_key out"
        )
    if not isinstance(cache_key, str) or not _KEY.fullmatch(cache_key):
        raise ValueError(
            f"cache_key={cache_key!r} cannot name a folder; use letters, digits and . _ = + -, "
            "starting with a letter or digit"
        )


def check_num_workers(num_workers: Any) -> None:
    """Checks that a number of worker processes is one.

    Raises:
        ValueError: it is not.
    """
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(
            f"num_workers is {num_workers!r}; set it to a number of processes, 0 for none"
        )


def store_path(cache_dir: str | Path, cache_key: str) -> Path:
    """Where the store of a key lies; ``~`` is the user's own folder.

    Raises:
        ValueError: the key cannot name a folder.
    """
    check_cache_arguments(cache_dir, cache_key)
    return Path(cache_dir).expanduser() / cache_key


def open_or_build(
    cache_dir: str | Path,
    cache_key: str,
    load: Callable[[], Any],
    *,
    num_workers: int = 0,
    labels_are_shifted: bool = False,
    fingerprint: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> TokenStore:
    """Opens the store of a key, building it first where there is none.

    Args:
        cache_dir: folder of all stores.
        cache_key: name of this one.
        load: makes the data set; called only by the process that builds.
        num_workers: worker processes of the build.
        labels_are_shifted: the data set's labels are targets.
        fingerprint: what the key was made of, kept in ``meta.json`` for the reader.
        progress: show a bar while building.

    Raises:
        ValueError: a sample does not meet the contract, or the store was built with another value
            of ``labels_are_shifted``.
        OSError: the store cannot be written, or this user may not read it.
    """
    check_num_workers(num_workers)
    folder = store_path(cache_dir, cache_key)
    store, problem = try_open(folder)
    if store is None:
        with build_lock(folder, problem=problem):
            store, problem = try_open(folder)
            if store is None:
                if problem is not None:
                    logger.warning("A damaged token store is built again: %s.", problem)
                for leftover in partial_folders(folder.parent, folder.name):
                    shutil.rmtree(leftover, ignore_errors=True)
                store = TokenStore.build(
                    folder,
                    load(),
                    num_workers=num_workers,
                    labels_are_shifted=labels_are_shifted,
                    progress=progress,
                    meta=store_meta(cache_key, fingerprint),
                )
    return check_shift(store, labels_are_shifted)


def try_open(folder: Path) -> tuple[TokenStore | None, str | None]:
    """Returns the store, or what is wrong with it; neither when there is nothing of that name."""
    try:
        if not folder.exists():
            return None, None
    except PermissionError as error:
        raise PermissionError(
            error.errno,
            f"the token store {folder} cannot be looked at: {error.strerror}; let cache_dir name a "
            "folder that this user may enter",
        ) from error
    try:
        return TokenStore.open(folder), None
    except StoreError as error:
        return None, str(error)


def check_shift(store: TokenStore, labels_are_shifted: bool) -> TokenStore:
    """Returns the store if its labels were read the way that they are meant now.

    Raises:
        ValueError: it was built with another value of ``labels_are_shifted``.
    """
    built_with = store.meta.get("labels_are_shifted")
    if built_with != labels_are_shifted:
        raise ValueError(
            f"the store {store.path} was built with labels_are_shifted={built_with}, now it is "
            f"{labels_are_shifted}; use another cache_key"
        )
    return store


def check_against(store: TokenStore, ds: Any) -> None:
    """Compares a store that was found with the data set that it is said to hold, by their lengths.

    A caller of the Python class chooses the key, and a key that stayed when the data changed is a
    common slip. No sample is read: that may be slow, and a store is there to spare it.

    Raises:
        ValueError: they have not as many samples.
    """
    if not hasattr(ds, "__len__") or len(ds) == store.accounting.num_samples:
        return
    raise ValueError(
        f"the store {store.path} was made from other data (it holds "
        f"{store.accounting.num_samples} samples, the data set has {len(ds)}); change cache_key "
        "whenever the tokens change, or remove the store with "
        f"`python -m torchtune_packing.store rm {store.path}`"
    )


def own_key(ds: Any) -> str | None:
    """A key that a data set brings along, None when it does not tell all that makes its tokens.

    Hugging Face's data sets know a hash of their content and transforms. torchtune's are made of
    such a data set, transforms and a tokenizer, all of which can be looked into.
    """
    fingerprint = getattr(ds, "_fingerprint", None)
    if isinstance(fingerprint, str):
        return fingerprint
    if type(ds).__module__.startswith("torchtune.datasets."):
        name = type(ds).__name__
        return f"{name}-{sha256_of(canonical(describe(ds)).encode())[:20]}"
    return None


@contextmanager
def build_lock(folder: Path, *, wait: bool = True, problem: str | None = None) -> Iterator[bool]:
    """Holds the lock that a process needs to build a store.

    Args:
        folder: the store.
        wait: False gives up at once when another process holds the lock.
        problem: what is wrong with the store that is there, None when there is none.

    Yields:
        Whether the lock is held; always True with ``wait``.

    Raises:
        OSError: the lock file cannot be made.
    """
    from filelock import FileLock, Timeout

    # Lock files stay: removing one while another process waits on it would let two build.
    lock_file = folder.parent / ".locks" / f"{folder.name}.lock"
    start = time.monotonic()
    patience = 1.0 if wait else 0.0
    is_held = False
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_file)
        while not is_held:
            try:
                lock.acquire(timeout=patience, poll_interval=0.1)
                is_held = True
            except Timeout:
                if not wait:
                    break
                logger.log(
                    logging.INFO if patience < 60 else logging.WARNING,
                    "Waiting since %.0f s for another process that builds %s (it holds %s).",
                    time.monotonic() - start,
                    folder,
                    lock_file,
                )
                patience = 60.0
    except OSError as error:
        found = f"there is no token store {folder} yet, and none can be built there"
        if problem is not None:
            found = f"a damaged token store cannot be built again ({problem})"
        raise OSError(
            error.errno,
            f"{found}: {error.strerror or error}. Let cache_dir name a folder that can be written",
        ) from error
    try:
        yield is_held
    finally:
        if is_held:
            lock.release()


def store_meta(cache_key: str, fingerprint: Mapping[str, Any] | None) -> dict[str, Any]:
    """Entries of ``meta.json`` that tell a reader what a store is."""
    versions = {"torchtune_packing": torchtune_packing.__version__}
    for name in _NOTED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"key": cache_key, "fingerprint": dict(fingerprint or {}), "versions": versions}


def store_folders(cache_dir: str | Path) -> list[Path]:
    """Folders in ``cache_dir`` that hold a store, whole or damaged, by name."""
    root = Path(cache_dir)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; name the cache_dir of a config")
    return sorted(
        entry
        for entry in root.iterdir()
        if not entry.name.startswith(".") and (entry / "meta.json").exists()
    )


def remove_store(folder: str | Path) -> None:
    """Removes one store.

    Raises:
        ValueError: the folder is not a token store.
    """
    check_removable(folder)
    # The folder itself, whatever link or dot leads there.
    real = Path(folder).resolve()
    # Without its name first, so that a removal cut short leaves nothing that looks like a store.
    aside = real.parent / f".tmp-{real.name}~removed-{uuid.uuid4().hex[:8]}"
    real.rename(aside)
    if Path(folder).is_symlink():
        Path(folder).unlink()
    shutil.rmtree(aside)


def check_removable(folder: str | Path) -> None:
    """Checks that a folder is a token store, whole or damaged, and nothing else.

    Raises:
        ValueError: it is not.
    """
    folder = Path(folder)
    if not (folder / "meta.json").is_file():
        raise ValueError(f"{folder} is not a token store (it has no meta.json); nothing is removed")
    foreign = sorted({entry.name for entry in folder.iterdir()} - FILE_NAMES)
    if foreign:
        raise ValueError(
            f"{folder} holds {foreign[0]!r}, which is no file of a token store; nothing is removed"
        )
