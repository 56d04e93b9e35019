"""``packed_dataset``: the one component that a config needs to pack another builder's data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from torchtune_packing.dataset import PackedDataset
from torchtune_packing.datasets.source_key import source_key
from torchtune_packing.datasets.sources import check_source, load_source, source_nodes
from torchtune_packing.plan import plan_packs
from torchtune_packing.store import TokenStore
from torchtune_packing.store.cache import check_cache_arguments, check_num_workers, open_or_build
from torchtune_packing.store.progress import is_main_process
from torchtune_packing.store.shards import build_in_shards

__all__ = ["build_store", "check_plan_arguments", "packed_dataset"]

logger = logging.getLogger(__name__)

#: What decides the packs, and not the store.
_PLAN_ARGUMENTS = ("max_seq_len", "strategy", "overlong", "split_across_pack", "max_packs", "seed")


def packed_dataset(
    tokenizer: Any,
    *,
    source: Any,
    max_seq_len: int | None = None,
    strategy: str = "best_fit",
    overlong: str = "error",
    split_across_pack: bool = False,
    max_packs: int | None = None,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    cache_key: str | None = None,
    num_workers: int = 0,
    labels_are_shifted: bool = False,
) -> PackedDataset:
    """Builds a packed data set from a config, in a recipe of ours or in torchtune's own.

        dataset:
          _component_: torchtune_packing.datasets.packed_dataset
          source:
            _component_: torchtune.datasets.alpaca_cleaned_dataset
          max_seq_len: 4096

    Args:
        tokenizer: torchtune tokenizer; the recipe passes it.
        source: config node of the builder to pack, called as ``builder(tokenizer, **keys)``; a list
            of nodes is read one after the other; a data set that is already built is taken as is.
        max_seq_len: most tokens in a pack.
        strategy: see ``PackedDataset``, as for all that follow.
        overlong: "error", "drop", "truncate" or "split".
        split_across_pack: cut documents where a pack ends.
        max_packs: most packs.
        seed: seed of the plan.
        cache_dir: folder for token stores.
        cache_key: name of the store in it; computed from the config when left out.
        num_workers: worker processes for tokenizing.
        labels_are_shifted: the source's labels are targets already.

    Returns:
        The packed data set; its ``padding_idx`` is the tokenizer's ``pad_id``.

    Raises:
        ValueError: the source cannot be packed, cannot be read, or yields bad samples.
    """
    nodes = source_nodes(source)
    for node in nodes:
        check_source(node)
    plan: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "strategy": strategy,
        "overlong": overlong,
        "split_across_pack": split_across_pack,
        "max_packs": max_packs,
        "seed": seed,
    }
    check_plan_arguments(plan)  # before anything is tokenized
    check_num_workers(num_workers)
    packs = PackedDataset(
        _store_or_source(
            nodes,
            tokenizer,
            cache_dir=cache_dir,
            cache_key=cache_key,
            num_workers=num_workers,
            labels_are_shifted=labels_are_shifted,
        ),
        **plan,
        padding_idx=getattr(tokenizer, "pad_id", None) or 0,
        labels_are_shifted=labels_are_shifted,
        num_workers=num_workers,
    )
    _tell_truncation(tokenizer, packs.store)
    return packs


def check_plan_arguments(settings: Mapping[str, Any]) -> None:
    """Checks what a config says of packs, without data.

    Args:
        settings: keys and values of a ``packed_dataset`` node; those of the store are passed over.

    Raises:
        ValueError: a value is out of its range, or there is no ``max_seq_len``.
    """
    if settings.get("max_seq_len") is None:
        raise ValueError(
            "dataset.max_seq_len is not set (and tokenizer.max_seq_len only bounds single "
            "samples); set dataset.max_seq_len to the number of tokens in a pack"
        )
    plan_packs([1], **{key: settings[key] for key in _PLAN_ARGUMENTS if key in settings})


def build_store(
    tokenizer: Any,
    dataset: Any,
    *,
    shard_size: int | None = None,
    progress: bool = True,
) -> TokenStore:
    """Builds the store of a config's data set ahead of training, by all processes of a launcher.

    Every process of ``tune run --nnodes N --nproc_per_node M`` calls this alike; each tokenizes
    ranges of the samples, and what was finished is kept when the command is repeated.

    Args:
        tokenizer: the built tokenizer.
        dataset: config node of a ``packed_dataset``; its ``cache_dir`` must be on a file
            system that all processes share.
        shard_size: samples in a shard; None fits it to the number of samples.
        progress: show a bar on rank 0.

    Returns:
        The store, which ``packed_dataset`` then finds by the same config.

    Raises:
        ValueError: there is no ``cache_dir``, or the source cannot be packed or read.
    """
    settings = OmegaConf.to_object(dataset) if OmegaConf.is_config(dataset) else dict(dataset)
    cache_dir = settings.get("cache_dir")
    if cache_dir is None:
        raise ValueError(
            "dataset.cache_dir is not set, so there is nowhere to keep a store; give it a folder "
            "that all processes share"
        )
    nodes = source_nodes(settings.get("source"))
    for node in nodes:
        check_source(node)
    check_plan_arguments(settings)
    shifted = settings.get("labels_are_shifted", False)
    cache_key, fingerprint = _named_or_computed_key(
        settings.get("cache_key"), nodes, tokenizer, cache_dir, labels_are_shifted=shifted
    )
    return build_in_shards(
        cache_dir,
        cache_key,
        lambda: load_source(nodes, tokenizer),
        shard_size=shard_size,
        num_workers=settings.get("num_workers", 0),
        labels_are_shifted=shifted,
        fingerprint=fingerprint,
        progress=progress,
    )


def _named_or_computed_key(
    cache_key: str | None,
    nodes: list[Any],
    tokenizer: Any,
    cache_dir: str | Path,
    *,
    labels_are_shifted: bool,
) -> tuple[str, Mapping[str, Any] | None]:
    """The key of a store and what it was made of, which nobody knows of a key that a user gave."""
    if cache_key is not None:
        return cache_key, None
    return source_key(nodes, tokenizer, labels_are_shifted=labels_are_shifted, cache_dir=cache_dir)


def _store_or_source(
    nodes: list[Any],
    tokenizer: Any,
    *,
    cache_dir: str | Path | None,
    cache_key: str | None,
    num_workers: int,
    labels_are_shifted: bool,
) -> Any:
    """The store of the config where stores are kept, else the data set to read into memory."""
    check_cache_arguments(cache_dir, cache_key)
    if cache_dir is None:
        return load_source(nodes, tokenizer)
    cache_key, fingerprint = _named_or_computed_key(
        cache_key, nodes, tokenizer, cache_dir, labels_are_shifted=labels_are_shifted
    )
    return open_or_build(
        cache_dir,
        cache_key,
        lambda: load_source(nodes, tokenizer),
        num_workers=num_workers,
        labels_are_shifted=labels_are_shifted,
        fingerprint=fingerprint,
    )


def _tell_truncation(tokenizer: Any, store: TokenStore) -> None:
    """One line when samples look cut by the tokenizer: no count of lost tokens can see those."""
    limit = getattr(tokenizer, "max_seq_len", None)
    if not isinstance(limit, int) or not is_main_process():
        return
    cut = int(np.count_nonzero(store.seq_lens == limit))
    if cut:
        logger.warning(
            "%s of %s documents have exactly tokenizer.max_seq_len=%s tokens, so the tokenizer "
            "probably cut them, and what it removed is not counted; leave tokenizer.max_seq_len "
            "out and set dataset.overlong to say what happens to long documents.",
            f"{cut:,}",
            f"{len(store):,}",
            f"{limit:,}",
        )
