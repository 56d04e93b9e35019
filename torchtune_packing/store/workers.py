"""Worker processes that read samples and hand over int32 arrays, in order.

The engine is torch's ``DataLoader``: it keeps the order and bounds what is in flight. Workers end
with this process, also when it is killed. They are forked where the system can fork, so a data set
need not be picklable there; elsewhere (Windows, macOS) it must be. Arrays travel through a pipe,
not through shared memory, of which containers often have little.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_packing.store.ingest import Chunk, SampleReadError, encode_samples

__all__ = ["iterate_chunks_in_workers"]

#: Samples that a worker takes at a time. Few enough to keep the memory in flight small, many enough
#: that handing over (about 0.2 ms) does not show beside tokenizing (about 0.2 ms a sample).
_MAX_RANGE = 128
_RANGES_PER_WORKER = 8


@dataclass(frozen=True)
class _Failure:
    """What a worker sends instead of chunks when a sample cannot be taken."""

    message: str
    is_bad_sample: bool
    trace: str

    def throw(self) -> None:
        """Raises what the same sample raises without workers, with the worker's trace behind it."""
        kind = ValueError if self.is_bad_sample else SampleReadError
        raise kind(self.message) from RuntimeError(f"in a worker process:\n{self.trace}")


class _Ranges(torch.utils.data.Dataset[Any]):
    """A data set cut into ranges of samples; item i is the list of chunks of range i."""

    def __init__(self, ds: Any, begin: int, end: int, size: int, labels_are_shifted: bool) -> None:
        self.ds = ds
        self.begin = begin
        self.end = end
        self.size = size
        self.labels_are_shifted = labels_are_shifted

    def __len__(self) -> int:
        return -(-(self.end - self.begin) // self.size)

    def __getitem__(self, index: int) -> list[Chunk] | _Failure:
        begin = self.begin + index * self.size
        end = min(self.end, begin + self.size)
        chunks = []
        try:
            while begin < end:
                chunk, begin = encode_samples(self.ds, begin, end, self.labels_are_shifted)
                chunks.append(chunk)
        except (ValueError, SampleReadError) as error:
            return _Failure(str(error), isinstance(error, ValueError), traceback.format_exc())
        return chunks


def _as_it_is(item: Any) -> Any:
    return item


def _set_up_worker(worker: int, *, parent: int) -> None:
    """Keeps a worker's garbage collector off the objects of its parent, and ends it with that.

    Looking at the objects would write to the pages that both share, and so copy them, one by one.
    """
    gc.freeze()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process once its parent is gone.

    A parent that is killed tells nobody. torch's own watch looks between two samples only, and then
    waits for a full pipe that nobody empties any more.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Tokenizers' own threads do not survive a fork, which it says loudly; workers replace them."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]


def iterate_chunks_in_workers(
    ds: Any, num_workers: int, labels_are_shifted: bool, begin: int, end: int
) -> Iterator[Chunk]:
    """Yields the chunks of a part of a map-style data set in order, made by worker processes.

    Args:
        ds: map-style data set with a length.
        num_workers: processes, at least 1.
        labels_are_shifted: see ``encode_samples``.
        begin: first sample.
        end: one past the last sample.

    Raises:
        ValueError: a sample does not meet the contract, or the data set cannot be sent to workers.
        SampleReadError: the data set raised; the worker's trace is the cause.
        RuntimeError: a worker died.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    size = max(1, min(_MAX_RANGE, (end - begin) // (num_workers * _RANGES_PER_WORKER)))
    loader = torch.utils.data.DataLoader(
        _Ranges(ds, begin, end, size, labels_are_shifted),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        multiprocessing_context="fork" if can_fork else None,
        worker_init_fn=functools.partial(_set_up_worker, parent=os.getpid()),
        # Its own generator: a store built now or found ready leaves the same random state.
        generator=torch.Generator(),
    )
    with _quiet_tokenizers():
        try:
            batches = iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if can_fork:
                raise
            raise ValueError(
                f"num_workers={num_workers} needs a data set that can be pickled, because this "
                f"system cannot fork ({error}); set num_workers=0"
            ) from error
        while True:
            try:
                item = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                raise RuntimeError(
                    f"a worker process that read the data set died ({error}); lack of memory is "
                    f"the usual cause, so try fewer than num_workers={num_workers}"
                ) from error
            if isinstance(item, _Failure):
                item.throw()
            yield from item
