"""A store built by many processes, on one machine or on several that share a file system.

The samples are cut into shards by their number alone, so any number of processes does the same
work. Each process takes shards that nobody has finished and nobody is at, under a file lock per
shard; a shard is a small store, written aside and renamed. When all are there, one process joins
them into the store that one process alone would have written, byte for byte.

    <cache_dir>/<key>/                      the store, once all is done
    <cache_dir>/.shards-<key>-<size>/00000/  samples 0 to size - 1
    <cache_dir>/.shards-<key>-<size>/00001/  ...

A process that dies gives up its lock, so the others take over its shard; a run that is repeated
finds the finished ones. Nobody waits inside a collective. Until the shards are removed, after the
join, they and the store take twice the room of the store.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_packing.store.cache import (
    build_lock,
    check_num_workers,
    check_shift,
    store_meta,
    store_path,
    try_open,
)
from torchtune_packing.store.files import StoreError, partial_folders, write_store
from torchtune_packing.store.ingest import Chunk, iterate_chunks
from torchtune_packing.store.progress import Progress
from torchtune_packing.store.token_store import TokenStore

__all__ = ["build_in_shards", "shard_size_for"]

logger = logging.getLogger(__name__)

#: Shards of a data set of usual size, so that the last ones keep every process busy.
_WANTED_SHARDS = 256
_MIN_SHARD, _MAX_SHARD = 1_000, 50_000


def shard_size_for(num_samples: int) -> int:
    """Samples in a shard: a function of the data set only, never of who builds."""
    return min(_MAX_SHARD, max(_MIN_SHARD, -(-num_samples // _WANTED_SHARDS)))


def build_in_shards(
    cache_dir: str | Path,
    cache_key: str,
    load: Callable[[], Any],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    shard_size: int | None = None,
    num_workers: int = 0,
    labels_are_shifted: bool = False,
    fingerprint: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> TokenStore:
    """Builds a store together with other processes that call this with the same arguments.

    Args:
        cache_dir: folder of all stores, on a file system that all processes share.
        cache_key: name of this one.
        load: makes the data set, which must be map-style with a length; called in every process.
        rank: number of this process; None reads ``RANK``, which torch's launcher sets. It only
            spreads the processes over the shards.
        world_size: number of processes; None reads ``WORLD_SIZE``.
        shard_size: samples in a shard; None takes what ``shard_size_for`` says.
        num_workers: worker processes in every process.
        labels_are_shifted: the data set's labels are targets.
        fingerprint: what the key was made of.
        progress: show a bar on rank 0.

    Returns:
        The store, in every process, once it is complete.

    Raises:
        ValueError: a sample does not meet the contract, or the data set has no length.
        SampleReadError: the data set raised.
        OSError: the files cannot be written, or this user may not read them.
    """
    check_num_workers(num_workers)
    folder = store_path(cache_dir, cache_key)
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    store, _ = try_open(folder)
    if store is not None:
        return check_shift(store, labels_are_shifted)
    ds = load()
    if not hasattr(ds, "__getitem__") or not hasattr(ds, "__len__"):
        raise ValueError(
            f"a {type(ds).__name__} has no length and no items to index, so processes cannot share "
            "it in ranges; use a map-style data set, or build with one process"
        )
    size = shard_size or shard_size_for(len(ds))
    work = _Work(folder, ds, size, num_workers, labels_are_shifted)
    for shard in range(work.num_shards):
        work.is_finished(shard)
    done = work.num_samples_done()
    with Progress(len(ds), "Tokenizing", done=done, enabled=progress and rank == 0) as bar:
        _build_shards(work, rank, world_size, bar)
    return _join(work, fingerprint)


class _Work:
    """The shards of one build, and which of them are known to be finished."""

    def __init__(
        self, folder: Path, ds: Any, size: int, num_workers: int, labels_are_shifted: bool
    ) -> None:
        self.folder = folder
        self.ds = ds
        self.size = size
        self.num_workers = num_workers
        self.labels_are_shifted = labels_are_shifted
        self.num_shards = -(-len(ds) // size)
        self.root = folder.parent / f".shards-{folder.name}-{size}"
        self.finished: set[int] = set()

    def path(self, shard: int) -> Path:
        return self.root / f"{shard:05d}"

    def bounds(self, shard: int) -> tuple[int, int]:
        return shard * self.size, min(len(self.ds), (shard + 1) * self.size)

    def open(self, shard: int) -> tuple[TokenStore | None, str | None]:
        """A shard of this data set, or what is wrong with it; neither where there is none.

        A key that the user gave may have stayed when the data changed since a build broke off.
        """
        path, (begin, end) = self.path(shard), self.bounds(shard)
        store, problem = try_open(path)
        if store is None:
            return None, problem
        if store.accounting.num_samples != end - begin:
            return None, (
                f"{path} holds {store.accounting.num_samples} samples, the data set has "
                f"{end - begin} there"
            )
        shifted = store.meta.get("labels_are_shifted")
        if shifted != self.labels_are_shifted:
            return None, f"{path} was built with labels_are_shifted={shifted}"
        return store, None

    def is_finished(self, shard: int) -> bool:
        """Looks once; a shard that was whole is not looked at again until it is joined."""
        if shard not in self.finished and self.open(shard)[0] is not None:
            self.finished.add(shard)
        return shard in self.finished

    def num_samples_done(self) -> int:
        """Samples of the shards that are known to be finished."""
        return sum(end - begin for begin, end in map(self.bounds, self.finished))

    def is_joined(self) -> bool:
        """True once the whole store is there."""
        return self.folder.exists() and try_open(self.folder)[0] is not None

    def build(self, shard: int, problem: str | None = None) -> None:
        begin, end = self.bounds(shard)
        problem = problem or self.open(shard)[1]
        if problem is not None:
            logger.warning("A shard is built again: %s.", problem)
        for leftover in partial_folders(self.root, self.path(shard).name):
            shutil.rmtree(leftover, ignore_errors=True)
        chunks = iterate_chunks(
            self.ds,
            num_workers=self.num_workers,
            labels_are_shifted=self.labels_are_shifted,
            begin=begin,
            end=end,
        )
        write_store(self.path(shard), chunks, meta={"labels_are_shifted": self.labels_are_shifted})
        self.finished.add(shard)


def _build_shards(work: _Work, rank: int, world_size: int, bar: Progress) -> None:
    """Builds until no shard is missing, those of this rank first, then whatever is left."""
    missing = sorted(range(work.num_shards), key=lambda shard: ((shard - rank) % world_size, shard))
    told = time.monotonic()
    # Another process may have joined and removed the shards while this one looked elsewhere.
    while missing and not work.is_joined():
        still_missing = []
        for shard in missing:
            if work.is_finished(shard):
                continue
            with build_lock(work.path(shard), wait=False) as is_mine:
                if not is_mine:
                    still_missing.append(shard)
                elif not work.is_finished(shard) and not work.is_joined():
                    work.build(shard)
            _show(work, bar)
        _show(work, bar)
        if still_missing == missing:
            if time.monotonic() - told > 60:
                told = time.monotonic()
                logger.warning("Waiting for %d shards that other processes build.", len(missing))
            time.sleep(0.2)
        missing = still_missing


def _show(work: _Work, bar: Progress) -> None:
    done = work.num_samples_done()
    if done > bar.done:
        bar.update(done - bar.done)


def _join(work: _Work, fingerprint: Mapping[str, Any] | None) -> TokenStore:
    with build_lock(work.folder):
        store, problem = try_open(work.folder)
        if store is None:
            if problem is not None:
                logger.warning("A damaged token store is built again: %s.", problem)
            for leftover in partial_folders(work.folder.parent, work.folder.name):
                shutil.rmtree(leftover, ignore_errors=True)
            meta = store_meta(work.folder.name, fingerprint)
            meta["labels_are_shifted"] = work.labels_are_shifted
            write_store(work.folder, _shards_in_order(work), meta=meta)
            store = TokenStore.open(work.folder)
        shutil.rmtree(work.root, ignore_errors=True)
    return check_shift(store, work.labels_are_shifted)


def _shards_in_order(work: _Work) -> Iterator[Chunk]:
    """Every shard as one chunk, its tokens still in the file; damaged ones are built anew."""
    for shard in range(work.num_shards):
        store, problem = work.open(shard)
        if store is not None:
            try:
                store.verify()
            except StoreError as error:
                problem = str(error)
        if store is None or problem is not None:
            work.build(shard, problem)
            store = TokenStore.open(work.path(shard))
        counts = store.accounting
        is_full = np.ones(counts.num_samples, dtype=bool)
        is_full[store.empty] = False
        seq_lens = np.zeros(counts.num_samples, dtype=np.int32)
        trained = np.zeros_like(seq_lens)
        seq_lens[is_full], trained[is_full] = store.seq_lens, store.trained
        yield Chunk(
            store.tokens,
            store.labels,
            seq_lens,
            trained,
            counts.num_labels,
            counts.num_lost_labels,
            counts.largest_id,
        )
