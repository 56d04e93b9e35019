"""The data of a run: data sets, order, and the micro-batches of every optimizer step left.

``TrainingData.steps`` is the whole schedule of a run as one iterator. Given a position it
yields the optimizer steps from there to the end, over epochs, each with all its micro-batches, so
that the trained targets are counted before the first backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from torchtune import config

from torchtune_packing.accounting import accounting_lines, check_token_loss, sample_lines
from torchtune_packing.dataset import PackedDataset, refuse_shifted
from torchtune_packing.datasets.sources import build_dataset, check_source
from torchtune_packing.datasets.truncation import with_exact_truncation
from torchtune_packing.loss import LossRows, Reduction, loss_rows
from torchtune_packing.sampler import StepSampler
from torchtune_packing.store import TokenStore
from torchtune_packing.training import preflight
from torchtune_packing.training.loading import EvenBatches, MicroBatch, make_loader
from torchtune_packing.training.metrics import StepCounts
from torchtune_packing.training.run import Run
from torchtune_packing.types import Sample

__all__ = ["Position", "SampleDataset", "Step", "TrainingData", "fingerprint", "open_dataset"]


@dataclass(frozen=True)
class Position:
    """Where a run stands: everything that decides which packs come next.

    Attributes:
        step: optimizer steps done.
        epoch: current epoch, from 0.
        packs_consumed: packs of this epoch that all ranks together have trained on.
    """

    step: int = 0
    epoch: int = 0
    packs_consumed: int = 0

    def as_dict(self) -> dict[str, int]:
        """The position as plain numbers, for a checkpoint."""
        return asdict(self)


@dataclass
class Step:
    """One optimizer step on this rank: its micro-batches and what they count over all ranks.

    Attributes:
        micro_batches: CPU batches in order.
        rows: the trained rows of each.
        counts: of all ranks.
        position: where the run stands once the step is done.
    """

    micro_batches: list[MicroBatch]
    rows: list[LossRows]
    counts: StepCounts
    position: Position

    def __iter__(self) -> Iterator[tuple[MicroBatch, LossRows]]:
        """Yields each micro-batch with its trained rows."""
        return zip(self.micro_batches, self.rows, strict=True)


class SampleDataset(Dataset[Sample]):
    """The documents of a store one by one, for padding-free batches of samples nobody packed.

    Args:
        store: documents end to end.
    """

    def __init__(self, store: TokenStore) -> None:
        self.store = store

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.store)

    def __getitem__(self, index: int) -> Sample:
        """Tokens and labels (unshifted) of one document, int64 ``[n]``."""
        document = self.store.document(index)
        return {key: torch.from_numpy(found.astype(np.int64)) for key, found in document.items()}  # type: ignore[return-value]

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return int(self.store.seq_lens.max())


def open_dataset(node: DictConfig, tokenizer: Any) -> PackedDataset | SampleDataset:
    """Builds the data set of a config node: packs as they are, anything else as single samples.

    Raises:
        ValueError: the node names data that no recipe here trains on (preference, multimodal).
    """
    if str(node.get("_component_", "")).rsplit(".", 1)[-1] == "packed_dataset":
        dataset = config.instantiate(node, tokenizer)
    else:
        plain = OmegaConf.to_container(node, resolve=True)
        check_source(plain)
        dataset = build_dataset(plain, with_exact_truncation(tokenizer), "dataset")
    if isinstance(dataset, (PackedDataset, SampleDataset)):
        return dataset
    store = TokenStore.from_samples(dataset)
    refuse_shifted(store)
    return SampleDataset(store)


def fingerprint(dataset: PackedDataset | SampleDataset) -> dict[str, Any]:
    """What must be the same when a run goes on: the tokens, and how they were packed."""
    store = dataset.store
    facts: dict[str, Any] = {
        "documents": len(store),
        "tokens": int(store.offsets[-1]),
        "content": store.checksum,
    }
    if isinstance(dataset, PackedDataset):
        for name in (
            "max_seq_len",
            "strategy",
            "overlong",
            "split_across_pack",
            "max_packs",
            "seed",
        ):
            facts[name] = getattr(dataset, name)
    return facts


class TrainingData:
    """Opens the data of a run and deals it out step by step.

    Args:
        run: the surroundings of the run; ``run.cfg`` names the tokenizer and the data sets.

    Attributes:
        tokenizer: built from ``cfg.tokenizer``.
        dataset: packs, or single samples for padding-free batches.
        dataset_val: the same of ``cfg.dataset_val``, or None.
        sampler: the order of packs and its share for this rank.
        steps_per_epoch: optimizer steps in an epoch.
        total_steps: optimizer steps of the whole run.

    Raises:
        ValueError: if the data cannot be used: unreadable, not packed, a document longer than the
            model has positions, or fewer packs than one step needs.
    """

    def __init__(self, run: Run) -> None:
        cfg, ranks = run.cfg, run.ranks
        self._run = run
        self._reduction: Reduction = cfg.get("loss_reduction", "token")
        padding_free = preflight.is_padding_free(cfg)
        self.tokenizer = config.instantiate(cfg.tokenizer)
        self.dataset = open_dataset(cfg.dataset, self.tokenizer)
        preflight.check_data(self.dataset, run.limits, padding_free=padding_free, key="dataset")
        if isinstance(self.dataset, PackedDataset):
            check_token_loss(self.dataset, cfg.get("max_token_loss", 0.01))
        self.dataset_val = None
        if cfg.get("dataset_val", None) is not None:
            self.dataset_val = open_dataset(cfg.dataset_val, self.tokenizer)
            preflight.check_data(self.dataset_val, run.limits, padding_free=True, key="dataset_val")
        self._data_fingerprint = fingerprint(self.dataset)
        self.sampler = self._make_sampler()
        self.steps_per_epoch = self.sampler.steps_per_epoch
        if cfg.get("max_steps_per_epoch", None) is not None:
            self.steps_per_epoch = min(self.steps_per_epoch, cfg.max_steps_per_epoch)
        self.total_steps = cfg.epochs * self.steps_per_epoch
        # Fixed shapes are for compiled code; elsewhere padding would only cost time.
        self._static = bool(cfg.get("compile", False)) or ranks.device.type == "cuda"

    def _make_sampler(self) -> Any:
        cfg, ranks = self._run.cfg, self._run.ranks
        common = {
            "gradient_accumulation_steps": self._run.accumulation,
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "seed": self._run.seed,
            "shuffle": cfg.get("shuffle", True),
            "balance": cfg.get("balance", None),
        }
        if cfg.get("max_tokens", None) is not None:
            from torchtune_packing.token_batches import TokenBatchSampler

            return TokenBatchSampler(
                self.dataset.store.seq_lens, max_tokens=cfg.max_tokens, **common
            )
        return StepSampler(
            len(self.dataset),
            batch_size=cfg.batch_size,
            **common,
        )

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must share with the one it goes on from."""
        cfg = self._run.cfg
        facts = {f"dataset.{k}": v for k, v in self._data_fingerprint.items()}
        if not isinstance(self.dataset, PackedDataset):
            # A position counts batches of this size, or samples where there is no size.
            facts["max_tokens"] = cfg.get("max_tokens", None)
        return {
            **facts,
            "model": str(cfg.model._component_),
            "seed": self._run.seed,
            "shuffle": cfg.get("shuffle", True),
        }

    def describe(self) -> str:
        """What packing did to the data, then the steps, and what is left over of each epoch."""
        what = f"{len(self.dataset):,} packs"
        if not isinstance(self.dataset, PackedDataset):
            what = f"{len(self.dataset):,} samples"
            if self._run.cfg.get("max_tokens", None) is not None:
                what = f"{self.sampler.num_packs:,} batches of at most {self.sampler.max_tokens:,} "
                what += "tokens"
        line = (
            f"{what}, {self.sampler.packs_per_step} per step, "
            f"{self.steps_per_epoch} steps per epoch"
        )
        left = self.sampler.num_leftover
        if left:
            line += f"; {left} of each epoch left out, too few for a step"
        if not isinstance(self.dataset, PackedDataset):
            block = sample_lines(self.dataset.store, self.sampler.steps_per_epoch)
            return "\n".join([*block, line])
        block = accounting_lines(
            self.dataset,
            self._run.ranks.world_size,
            self.sampler.packs_per_step,
            batch_size=self._run.cfg.batch_size,
            seed=self._run.seed,
            shuffle=self._run.cfg.get("shuffle", True),
            balance=self.sampler.balance,
        )
        return "\n".join([*block, line])

    def steps(self, position: Position) -> Iterator[Step]:
        """Yields the optimizer steps that are left of the run.

        Args:
            position: where to go on; ``Position()`` for a new run.
        """
        while position.epoch < self._run.cfg.epochs:
            for step in self._steps_of_epoch(position):
                yield step
                position = step.position
            position = Position(step=position.step, epoch=position.epoch + 1)

    def _left_in_epoch(self, position: Position) -> int:
        done = position.packs_consumed // self.sampler.packs_per_step
        left = (self.sampler.num_packs - position.packs_consumed) // self.sampler.packs_per_step
        return max(0, min(self.steps_per_epoch - done, left))

    def _steps_of_epoch(self, position: Position) -> Iterator[Step]:
        costs = None
        if isinstance(self.dataset, PackedDataset):
            self.dataset.set_epoch(position.epoch)
            costs = self.dataset.plan.attention_cost
        self.sampler.set_epoch(position.epoch, packs_consumed=position.packs_consumed, costs=costs)
        batches = iter(
            make_loader(
                self.dataset,
                self.sampler,
                padding_idx=self.tokenizer.pad_id,
                num_workers=self._run.cfg.get("num_workers", 0),
                pin_memory=self._run.device.type == "cuda",
                static_shapes=self._static,
            )
        )
        for _ in range(self._left_in_epoch(position)):
            items = [next(batches) for _ in range(self._run.accumulation)]
            position = replace(
                position,
                step=position.step + 1,
                packs_consumed=position.packs_consumed + self.sampler.packs_per_step,
            )
            yield self._step(items, position)

    def _step(self, items: list[MicroBatch], position: Position) -> Step:
        counts, rows = StepCounts(), []
        for item in items:
            found = loss_rows(item.batch["labels"], item.batch["seq_lens"], self._reduction)
            counts.add(item.counts(found.num_trained, found.count))
            rows.append(found)
        return Step(items, rows, counts.over_ranks(self._run.ranks), position)

    def rows_of(self, position: Position) -> str:
        """What the step that ends at ``position`` was made of, on all ranks, for a message."""
        last = position.packs_consumed
        rows = self.sampler.order()[last - self.sampler.packs_per_step : last].tolist()
        if isinstance(self.dataset, PackedDataset):
            return f"packs {rows}"
        if self._run.cfg.get("max_tokens", None) is None:
            return f"samples {rows}"
        return f"samples {[sample for batch in rows for sample in self.sampler.batch(batch)]}"

    def validation_loader(self) -> Any:
        """Every validation document once, over all ranks; None without a validation set."""
        if self.dataset_val is None:
            return None
        cfg, ranks = self._run.cfg, self._run.ranks
        batches = EvenBatches(
            len(self.dataset_val),
            batch_size=cfg.get("val_batch_size", None) or cfg.get("batch_size", None) or 1,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        return make_loader(self.dataset_val, batches, padding_idx=self.tokenizer.pad_id)
