"""The files of a store: written aside and renamed, checked when opened.

    <folder>/
        tokens.npy  labels.npy   int32 [T]     streamed while the data set is read
        seq_lens.npy trained.npy int32 [n]
        empty.npy                int64         samples that hold no token
        meta.json                sizes, sha256 of each array, counts, what the key was made of

A folder gets its final name only when all of this is on the disk, so a half-written store is never
taken for a whole one. Every ``.npy`` header is 128 bytes, because the length is known only at the
end and the header is then written over; ``numpy.load`` reads the files as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_packing.store.accounting import DocumentTable, StoreAccounting
from torchtune_packing.store.ingest import Chunk

__all__ = [
    "FILE_NAMES",
    "FORMAT",
    "StoreError",
    "open_arrays",
    "partial_folders",
    "read_meta",
    "verify_arrays",
    "write_store",
]

#: Raised whenever files of an older version could be misread.
FORMAT = 2

_HEADER_SIZE = 128
_DTYPES = {
    "tokens": "<i4",
    "labels": "<i4",
    "seq_lens": "<i4",
    "trained": "<i4",
    "empty": "<i8",
}
FILE_NAMES = frozenset({"meta.json", *(f"{name}.npy" for name in _DTYPES)})
#: Small arrays whose checksum is compared at every opening.
_PER_DOCUMENT = ("seq_lens", "trained", "empty")
_READ_SIZE = 1 << 22


class StoreError(ValueError):
    """A folder does not hold a whole store: it is to be built again."""


def _read_error(path: Path, error: OSError) -> Exception:
    """What is wrong with a file that cannot be read: damage, or somebody else's whole store."""
    if isinstance(error, PermissionError):
        return PermissionError(
            error.errno,
            f"the token store {path.parent} may not be read ({path.name}: {error.strerror}); have "
            "its owner allow that, or let cache_dir name another folder",
        )
    state = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
    return StoreError(f"{path} {state} ({error.strerror or error})")


class _ArrayWriter:
    """Streams one array into a ``.npy`` file of a length that is known only at the end."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.length = 0
        self._sha256 = hashlib.sha256()
        self._file = open(folder / f"{name}.npy", "wb", buffering=1 << 20)
        self._file.write(bytes(_HEADER_SIZE))

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=_DTYPES[self.name]).view(np.uint8).data
        self._file.write(data)
        self._sha256.update(data)
        self.length += len(values)

    def finish(self) -> dict[str, Any]:
        """Completes the header, forces the file to the disk and describes it."""
        self._file.seek(0)
        self._file.write(_npy_header(_DTYPES[self.name], self.length))
        self._file.flush()
        os.fsync(self._file.fileno())
        size = os.fstat(self._file.fileno()).st_size
        self._file.close()
        return {
            "dtype": _DTYPES[self.name],
            "length": self.length,
            "bytes": size,
            "sha256": self._sha256.hexdigest(),
        }

    def close(self) -> None:
        self._file.close()


def _npy_header(dtype: str, length: int) -> bytes:
    """Version 1.0 header of a one-dimensional array, padded to ``_HEADER_SIZE`` bytes."""
    fields = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},), }}"
    size = _HEADER_SIZE - 10
    return (
        b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + fields.ljust(size - 1).encode() + b"\n"
    )


def write_store(
    folder: Path,
    chunks: Iterable[Chunk],
    *,
    meta: Mapping[str, Any] | None = None,
    on_chunk: Any = None,
) -> None:
    """Writes chunks as a store, in one pass and with memory for one chunk and the lengths.

    Args:
        folder: where the store is to lie; its parent is made when missing. What lies there
            already is replaced in the same moment in which the new store is complete.
        chunks: documents in order.
        meta: what else to keep in ``meta.json`` (key, fingerprint, versions).
        on_chunk: called with every chunk once it is written.

    Raises:
        OSError: the disk is full or cannot be written; nothing is left behind.
    """
    # The tilde cannot be part of a key, so no build takes another's folder for its own leftover.
    who = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    aside = folder.parent / f".tmp-{folder.name}~{who}"
    try:
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise _write_error(folder, error) from error
        _write_files(folder, aside, chunks, dict(meta or {}), on_chunk)
        _put_in_place(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_files(
    folder: Path, aside: Path, chunks: Iterable[Chunk], meta: dict[str, Any], on_chunk: Any
) -> None:
    table = DocumentTable()
    tokens, labels = _ArrayWriter(aside, "tokens"), _ArrayWriter(aside, "labels")
    try:
        for chunk in chunks:
            try:
                tokens.append(chunk.tokens)
                labels.append(chunk.labels)
            except OSError as error:
                raise _write_error(folder, error) from error
            table.add(chunk)
            if on_chunk is not None:
                on_chunk(chunk)
        try:
            files = {"tokens.npy": tokens.finish(), "labels.npy": labels.finish()}
            for name, values in table.arrays().items():
                writer = _ArrayWriter(aside, name)
                writer.append(values)
                files[f"{name}.npy"] = writer.finish()
            _write_meta(aside, meta, table.accounting(), files)
        except OSError as error:
            raise _write_error(folder, error) from error
    finally:
        # Closing flushes; on a full disk that fails again, and the first error is the one to tell.
        for writer in (tokens, labels):
            try:
                writer.close()
            except OSError:
                pass


def _write_meta(
    aside: Path, meta: dict[str, Any], accounting: StoreAccounting, files: Mapping[str, Any]
) -> None:
    content = {"format": FORMAT, **meta, "accounting": accounting.as_dict(), "files": files}
    with open(aside / "meta.json", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(aside)


def _put_in_place(aside: Path, folder: Path) -> None:
    """Gives a finished folder its name; a damaged store of that name moves out first."""
    old = aside.with_name(aside.name + "-old")
    if folder.exists() or folder.is_symlink():
        os.rename(folder, old)
    os.rename(aside, folder)
    sync_folder(folder.parent)
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(folder: Path, error: OSError) -> OSError:
    try:
        free = f"{shutil.disk_usage(_existing(folder)).free / 1e9:.1f} GB free"
    except OSError:
        free = "free space unknown"
    reason = error.strerror or str(error)
    return OSError(
        error.errno,
        f"the token store {folder} could not be written: {reason} ({free}; a store takes 8 bytes a "
        "token). Free some space or let cache_dir name a folder that can be written",
    )


def _existing(folder: Path) -> Path:
    return next(part for part in [folder, *folder.absolute().parents] if part.exists())


def partial_folders(cache_dir: Path, name: str = "") -> Iterator[Path]:
    """Folders that killed builds left behind, of one store or, with finished shards, of all.

    Shards are not of the first kind: a command that is repeated goes on with them.
    """
    prefixes = (f".tmp-{name}~",) if name else (".tmp-", ".shards-")
    if cache_dir.is_dir():
        yield from sorted(entry for entry in cache_dir.iterdir() if entry.name.startswith(prefixes))


def read_meta(folder: Path) -> dict[str, Any]:
    """Reads ``meta.json`` of a store.

    Raises:
        StoreError: there is none, it cannot be read, or it is of another format.
        PermissionError: this user may not read it.
    """
    try:
        with open(folder / "meta.json", encoding="utf-8") as file:
            meta = json.load(file)
    except OSError as error:
        raise _read_error(folder / "meta.json", error) from error
    except ValueError as error:
        raise StoreError(f"meta.json in {folder} is damaged ({error})") from error
    if not isinstance(meta, dict) or "format" not in meta:
        raise StoreError(f"meta.json in {folder} does not describe a token store")
    if meta["format"] != FORMAT:
        raise StoreError(
            f"the store {folder} has format {meta['format']}, and this version reads format "
            f"{FORMAT}; build it again"
        )
    return meta


def open_arrays(
    folder: Path, meta: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], StoreAccounting]:
    """Maps the arrays of a store into memory, read-only.

    Sizes, headers and the per-document arrays are checked against ``meta.json``; the tokens are
    not read (``verify_arrays`` does that).

    Raises:
        StoreError: something does not fit.
        PermissionError: this user may not read an array.
    """
    try:
        arrays = {name: _open_array(folder, name, meta["files"][f"{name}.npy"]) for name in _DTYPES}
        accounting = StoreAccounting(**meta["accounting"])
        sums = {name: meta["files"][f"{name}.npy"]["sha256"] for name in _DTYPES}
    except (KeyError, TypeError) as error:
        raise StoreError(f"meta.json in {folder} is incomplete ({error})") from error
    for name in _PER_DOCUMENT:
        if hashlib.sha256(arrays[name].view(np.uint8).data).hexdigest() != sums[name]:
            raise StoreError(f"{name}.npy in {folder} does not match its checksum")
    num_tokens = int(arrays["seq_lens"].sum(dtype=np.int64))
    if not num_tokens == len(arrays["tokens"]) == len(arrays["labels"]) == accounting.num_tokens:
        raise StoreError(
            f"{folder} holds {len(arrays['tokens'])} tokens and {len(arrays['labels'])} labels for "
            f"documents of {num_tokens} tokens"
        )
    return arrays, accounting


def _open_array(folder: Path, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    path = folder / f"{name}.npy"
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _read_error(path, error) from error
    if size != entry["bytes"]:
        raise StoreError(f"{path} has {size} bytes instead of {entry['bytes']}")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise _read_error(path, error) from error
    except ValueError as error:
        raise StoreError(f"{path} is not a readable array ({error})") from error
    if array.dtype.str != _DTYPES[name] or array.shape != (entry["length"],):
        raise StoreError(
            f"{path} holds {array.dtype} {list(array.shape)} instead of {_DTYPES[name]} "
            f"[{entry['length']}]"
        )
    # A plain view: slicing a memmap object runs Python code for every slice.
    return np.asarray(array)


def verify_arrays(folder: Path, meta: Mapping[str, Any]) -> None:
    """Reads every array and compares it with its checksum.

    Raises:
        StoreError: an array was changed after it was written.
    """
    for name in _DTYPES:
        digest = hashlib.sha256()
        path = folder / f"{name}.npy"
        with open(path, "rb") as file:
            file.seek(_HEADER_SIZE)
            while block := file.read(_READ_SIZE):
                digest.update(block)
        if digest.hexdigest() != meta["files"][f"{name}.npy"]["sha256"]:
            raise StoreError(f"{path} does not match its checksum; build the store again")
