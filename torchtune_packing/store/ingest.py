"""From samples to int32 chunks: the only place where Python objects become arrays.

A chunk holds the documents of some hundred consecutive samples, end to end. It is made in this
process or in worker processes by the same function, so the bytes do not depend on who makes it.
What travels between processes is three arrays, never lists of Python ints: handing those over is
slower than tokenizing in one process.

The cost is one ``struct.pack`` per list, which checks type and range of every element on the way.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtune_packing.types import IGNORE_INDEX

__all__ = ["Chunk", "SampleReadError", "encode_samples", "finish_chunk", "iterate_chunks"]

_INT32 = np.iinfo(np.int32)
#: A chunk made in this process ends after so many tokens or samples, whichever comes first.
_MAX_CHUNK_TOKENS = 1 << 18
_MAX_CHUNK_SAMPLES = 1024

#: Keys that tell apart data that cannot be packed as plain token sequences.
_PREFERENCE_KEYS = ("chosen", "rejected", "chosen_input_ids", "rejected_input_ids")
_MULTIMODAL_KEYS = ("images", "pixel_values", "encoder_input")


class SampleReadError(RuntimeError):
    """The data set itself raised while one of its samples was read."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The documents of consecutive samples, end to end.

    ``tokens`` and ``labels`` are int32 ``[t]``, labels unshifted. ``seq_lens`` and ``trained`` are
    int32, one entry per *sample*, so an empty sample is a 0 here. ``trained`` counts labels other
    than ``IGNORE_INDEX`` behind the first position. ``num_labels`` counts them at any position;
    ``num_lost_labels`` those that a shifted source held for a token that is not in the sample.
    ``largest_id`` is that of tokens and labels, -1 without any.
    """

    tokens: np.ndarray
    labels: np.ndarray
    seq_lens: np.ndarray
    trained: np.ndarray
    num_labels: int
    num_lost_labels: int
    largest_id: int


def encode_samples(
    ds: Any, begin: int, end: int, labels_are_shifted: bool = False
) -> tuple[Chunk, int]:
    """Reads samples ``begin`` up to ``end`` of a map-style data set into one chunk.

    Args:
        ds: data set with ``__getitem__``.
        begin: first sample.
        end: one past the last sample wanted.
        labels_are_shifted: the samples' ``labels[t]`` is the target of position t.

    Returns:
        The chunk and the sample to go on with: ``end``, or less when the chunk was full before.

    Raises:
        ValueError: a sample does not meet the contract; the message names it.
        SampleReadError: the data set raised.
    """
    tokens, labels, seq_lens = array("i"), array("i"), array("i")
    index = begin
    while index < end and len(tokens) < _MAX_CHUNK_TOKENS:
        try:
            sample = ds[index]
        except Exception as error:
            raise _read_error(index, error) from error
        seq_lens.append(_append_sample(sample, index, tokens, labels))
        index += 1
    return finish_chunk(tokens, labels, seq_lens, labels_are_shifted, begin), index


def finish_chunk(
    tokens: array[int] | np.ndarray,
    labels: array[int] | np.ndarray,
    seq_lens: array[int] | np.ndarray,
    labels_are_shifted: bool,
    first_sample: int,
    where: str = "",
) -> Chunk:
    """Turns int32 buffers into a chunk: checks ids, unshifts labels, counts what is trained.

    Args:
        tokens: int32 ``[t]``.
        labels: int32 ``[t]``.
        seq_lens: int32, one length per sample, zeros allowed.
        labels_are_shifted: ``labels[t]`` is the target of position t rather than its own label.
        first_sample: number of the first sample in the data set.
        where: the file of the samples, for a message.

    Raises:
        ValueError: a token id is negative, or a label that is not ``IGNORE_INDEX``.
    """
    tokens, labels, lengths = (_as_array(values) for values in (tokens, labels, seq_lens))
    _refuse_negative(tokens, labels, lengths, first_sample, where)
    full = np.flatnonzero(lengths)
    ends = np.cumsum(lengths[full], dtype=np.int64)
    starts = ends - lengths[full]
    num_lost = 0
    if labels_are_shifted and len(full):
        num_lost = int(np.count_nonzero(labels[ends - 1] != IGNORE_INDEX))
        unshifted = np.empty_like(labels)
        unshifted[1:] = labels[:-1]
        unshifted[starts] = IGNORE_INDEX
        labels = unshifted
    is_label = labels != IGNORE_INDEX
    num_labels = int(np.count_nonzero(is_label))
    is_label[starts] = False
    trained = np.zeros_like(lengths)
    if len(full):
        trained[full] = np.add.reduceat(is_label, starts, dtype=np.int32)
    largest = int(max(tokens.max(initial=-1), labels.max(initial=-1)))
    return Chunk(tokens, labels, lengths, trained, num_labels, num_lost, largest)


def _refuse_negative(
    tokens: np.ndarray, labels: np.ndarray, lengths: np.ndarray, first_sample: int, where: str
) -> None:
    """Raises for ids that no vocabulary has; on a GPU they would end in an assertion much later."""
    for name, values in (("tokens", tokens), ("labels", labels)):
        wrong = values < 0
        if name == "labels":
            wrong &= values != IGNORE_INDEX
        if wrong.any():
            position = int(wrong.argmax())
            row = int(np.searchsorted(np.cumsum(lengths), position, side="right"))
            file = f" ({where})" if where else ""
            raise ValueError(
                f"sample {first_sample + row}{file} has {values[position]} among its {name}; token "
                f"ids are 0 or more, and a label that is not trained is {IGNORE_INDEX}"
            )


def _as_array(values: array[int] | np.ndarray) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else np.frombuffer(values, dtype=np.int32)


def iterate_chunks(
    ds: Any,
    *,
    num_workers: int = 0,
    labels_are_shifted: bool = False,
    begin: int = 0,
    end: int | None = None,
) -> Iterator[Chunk]:
    """Yields the chunks of samples ``begin`` up to ``end`` of a data set, in order.

    Args:
        ds: map-style data set, columns of tokens, or any iterable of samples (which is read
            in this process, and whole).
        num_workers: worker processes that read and encode samples; 0 reads in this process.
        labels_are_shifted: see ``encode_samples``.
        begin: first sample.
        end: one past the last sample; None is the end of the data set.

    Raises:
        ValueError: a sample does not meet the contract; the message names it.
        SampleReadError: the data set raised.
    """
    if not hasattr(ds, "__getitem__") or not hasattr(ds, "__len__"):
        yield from _iterate_iterable(ds, labels_are_shifted)
        return
    end = len(ds) if end is None else end
    columns = _columns_of(ds)
    if type(ds) is torch.utils.data.ConcatDataset and any(map(_columns_of, ds.datasets)):
        yield from _iterate_parts(ds.datasets, num_workers, labels_are_shifted, begin, end)
    elif columns is not None:
        yield from columns.chunks(labels_are_shifted=labels_are_shifted, begin=begin, end=end)
    elif num_workers > 0 and end - begin > 1:
        from torchtune_packing.store.workers import iterate_chunks_in_workers

        yield from iterate_chunks_in_workers(ds, num_workers, labels_are_shifted, begin, end)
    else:
        while begin < end:
            stop = min(end, begin + _MAX_CHUNK_SAMPLES)
            chunk, begin = encode_samples(ds, begin, stop, labels_are_shifted)
            yield chunk


def _iterate_parts(
    parts: Sequence[Any], num_workers: int, labels_are_shifted: bool, begin: int, end: int
) -> Iterator[Chunk]:
    """The same over several data sets of which some hold columns, one after the other."""
    offset = 0
    for number, part in enumerate(parts):
        low, high = max(begin - offset, 0), min(end - offset, len(part))
        offset += len(part)
        if low >= high:
            continue
        try:
            yield from iterate_chunks(
                part,
                num_workers=num_workers,
                labels_are_shifted=labels_are_shifted,
                begin=low,
                end=high,
            )
        except (ValueError, SampleReadError) as error:
            raise type(error)(f"in source {number} of {len(parts)}: {error}") from error


def _columns_of(ds: Any) -> Any:
    """Only objects that may hold columns cost the import of the reader."""
    if type(ds).__module__ not in ("datasets.arrow_dataset", "torchtune_packing.store.columns"):
        return None
    from torchtune_packing.store.columns import token_columns_of

    return token_columns_of(ds)


def _iterate_iterable(ds: Any, labels_are_shifted: bool) -> Iterator[Chunk]:
    samples = iter(ds)
    index, done = 0, False
    while not done:
        first = index
        tokens, labels, seq_lens = array("i"), array("i"), array("i")
        while len(seq_lens) < _MAX_CHUNK_SAMPLES and len(tokens) < _MAX_CHUNK_TOKENS:
            try:
                sample = next(samples)
            except StopIteration:
                done = True
                break
            except Exception as error:
                raise _read_error(index, error) from error
            seq_lens.append(_append_sample(sample, index, tokens, labels))
            index += 1
        if len(seq_lens):
            yield finish_chunk(tokens, labels, seq_lens, labels_are_shifted, first)


def _read_error(index: int, error: BaseException) -> SampleReadError:
    return SampleReadError(
        f"reading sample {index} of the data set failed with {type(error).__name__}: {error}; look "
        "at that row of the source for a missing column, or a value that is null or no text"
    )


def _append_sample(sample: Any, index: int, tokens: array[int], labels: array[int]) -> int:
    """Appends one sample to the chunk's buffers and returns its length."""
    try:
        sample_tokens, sample_labels = sample["tokens"], sample["labels"]
    except (KeyError, TypeError, IndexError):
        raise ValueError(_explain_keys(sample, index)) from None
    if index == 0:
        _refuse_multimodal(sample)
    packed_tokens = _to_int32_bytes(sample_tokens, "tokens", index)
    packed_labels = _to_int32_bytes(sample_labels, "labels", index)
    if len(packed_tokens) != len(packed_labels):
        raise ValueError(
            f"sample {index} has {len(packed_tokens) // 4} tokens but {len(packed_labels) // 4} "
            "labels; a sample needs one label per token, -100 where nothing is to be learned"
        )
    tokens.frombytes(packed_tokens)
    labels.frombytes(packed_labels)
    return len(packed_tokens) // 4


def _to_int32_bytes(values: Any, name: str, index: int) -> bytes:
    if type(values) is list:
        try:
            packed = struct.pack(f"{len(values)}i", *values)
        except struct.error:
            raise ValueError(_explain_element(values, name, index)) from None
        # A mask under the name of labels would otherwise train on the ids 0 and 1.
        if values and type(values[0]) is bool:
            raise ValueError(_explain_element(values, name, index))
        return packed
    return _array_to_int32(values, name, index).tobytes()


def _array_to_int32(values: Any, name: str, index: int) -> np.ndarray:
    """Checks an array, tensor or sequence and returns it as int32 ``[n]``."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes | array):
        return np.frombuffer(_to_int32_bytes(list(values), name, index), dtype=np.int32)
    found = np.asarray(values)
    if found.ndim != 1:
        raise ValueError(
            f"sample {index} has {name} of shape {list(found.shape)} and type "
            f"{type(values).__name__}; give one flat list or array of token ids per sample"
        )
    if found.size == 0:
        return np.empty(0, np.int32)
    if found.dtype.kind not in "iu":
        raise ValueError(
            f"sample {index} has {name} of dtype {found.dtype}; token ids and labels must be "
            "integers, so convert them in the data set"
        )
    low, high = int(found.min()), int(found.max())
    if low < _INT32.min or high > _INT32.max:
        bad = low if low < _INT32.min else high
        raise ValueError(_out_of_range(bad, name, index))
    return found.astype(np.int32, copy=False)


def _explain_element(values: Sequence[Any], name: str, index: int) -> str:
    """Finds the element that cannot be an int32 and says so."""
    for position, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            shown = repr(value)[:40]
            return (
                f"sample {index} has {shown} ({type(value).__name__}) at position {position} of "
                f"its {name}; token ids and labels must be integers, -100 for a label that is not "
                "trained"
            )
        if not _INT32.min <= int(value) <= _INT32.max:
            return _out_of_range(int(value), name, index)
    return f"sample {index} has {name} that are not integers"


def _out_of_range(value: int, name: str, index: int) -> str:
    return (
        f"sample {index} has {value} among its {name}, outside of int32 "
        f"({_INT32.min} to {_INT32.max}); check the tokenizer"
    )


def _explain_keys(sample: Any, index: int) -> str:
    if not isinstance(sample, Mapping):
        return (
            f"sample {index} is a {type(sample).__name__}; a sample must be a dict with the keys "
            "'tokens' and 'labels', as torchtune's data sets yield"
        )
    keys = [str(key) for key in sample]
    if any(key in keys for key in _PREFERENCE_KEYS):
        return (
            f"sample {index} has the keys {keys}: preference data (chosen and rejected answers) "
            "cannot be packed; use a data set for supervised finetuning"
        )
    missing = " and ".join(f"'{key}'" for key in ("tokens", "labels") if key not in keys)
    hint = ""
    if "labels" not in keys and "mask" in keys:
        hint = " (a 'mask' alone is not taken: use labels of -100 where nothing is to be learned)"
    return f"sample {index} has no {missing}, only the keys {keys}; add what is missing{hint}"


def _refuse_multimodal(sample: Mapping[str, Any]) -> None:
    """Refuses samples with images, which a token store would lose; the first one tells."""
    found = [key for key in _MULTIMODAL_KEYS if key in sample and sample[key] is not None]
    if found:
        raise ValueError(
            f"sample 0 has the key {found[0]!r}: multimodal samples cannot be packed, only text; "
            "use a text data set"
        )
