"""The step that both training recipes run: what it refuses, and how often it waits."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import ByteTokenizer, Sums, tiny_model
from torchtune_packing import PackedDataset
from torchtune_packing.attention import install_attention
from torchtune_packing.loss import loss_rows
from torchtune_packing.training.data import Step
from torchtune_packing.training.loading import EvenBatches, make_loader
from torchtune_packing.training.metrics import StepCounts, StepMeter
from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.step import PackedForward, accumulate_gradients

CPU = torch.device("cpu")


def micro_batches(**options: Any) -> list[Any]:
    packs = PackedDataset(Sums(ByteTokenizer(), num_samples=20), max_seq_len=48)
    batches = EvenBatches(len(packs), batch_size=2)
    return list(make_loader(packs, batches, padding_idx=257, **options))


def forward_of(model: Any) -> PackedForward:
    return PackedForward(model, install_attention(model, "sdpa", device=CPU, dtype=torch.float32))


class Readings(TorchDispatchMode):
    """Counts what makes the host wait for the device: reading a value back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_reads_its_loss_once_however_many_micro_batches() -> None:
    items = micro_batches()[:3]
    assert len(items) == 3
    rows = [loss_rows(item.batch["labels"], item.batch["seq_lens"]) for item in items]
    counts = StepCounts()
    for item, found in zip(items, rows, strict=True):
        counts.add(item.counts(found.num_trained, found.count))
    step = Step(items, rows, counts, position=None)
    forward = forward_of(tiny_model())
    alone = [forward.loss(*pair).item() for pair in zip(items, rows, strict=True)]
    ranks = Ranks(0, 1, CPU)
    with Readings() as readings:
        loss = accumulate_gradients(
            step, forward.loss, ranks=ranks, meter=StepMeter(ranks, total_steps=1)
        )
    assert loss == pytest.approx(sum(alone) / counts.divisor, rel=1e-6)
    waits = {name for name in readings.calls if "_local_scalar_dense" in name}
    assert not waits


def test_B11_a_batch_without_seq_lens_is_refused_by_the_step() -> None:
    item = micro_batches()[0]
    rows = loss_rows(item.batch["labels"], item.batch["seq_lens"])
    del item.batch["seq_lens"]
    with pytest.raises(ValueError, match="tokens, labels, input_pos and no seq_lens"):
        forward_of(tiny_model()).loss(item, rows)


def test_B37_padding_free_rows_of_compiled_code_have_few_widths() -> None:
    samples = Sums(ByteTokenizer())
    batches = EvenBatches(len(samples), batch_size=4)
    loader = make_loader(samples, batches, padding_idx=257, static_shapes=True)
    widths = Counter(item.batch["tokens"].shape[1] for item in loader)
    assert widths == {512: 50}
    item = next(iter(loader))
    real = sum(len(samples[i]["tokens"]) for i in range(4))
    assert item.real_lengths.tolist() == [real]
    assert item.batch["seq_lens"].sum() == 512
    assert (item.batch["labels"][0, real:] == -100).all()
