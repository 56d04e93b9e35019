"""Benchmarks that cannot run here still get to their end, on stand-ins for what is missing."""

from typing import Any

import pytest
import torch
from torchtune.models.llama3 import llama3

from benchmarks import gpu_step


def test_the_gpu_benchmark_goes_through_every_candidate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, with torch.cuda's clock and memory replaced; sdpa and varlen run for real."""
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 2**29)
    monkeypatch.setitem(
        gpu_step.BUILDERS,
        "135m",
        lambda: llama3(
            vocab_size=49_152,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            embed_dim=16,
            max_seq_len=256,
            intermediate_dim=16,
        ),
    )
    clock = iter(range(1000))  # a step takes one second for everybody
    monkeypatch.setattr(gpu_step.time, "perf_counter", lambda: next(clock))
    found: dict[str, Any] = gpu_step.at_length(256, "135m", 2, torch.device("cpu"))
    assert list(found) == ["padded", "sdpa", "flex", "varlen", "flash_attn"]
    for name in ("padded", "sdpa", "varlen"):
        numbers = found[name]
        assert numbers["times_padded"] == {"median": 1, "min": 1, "max": 1}
        assert numbers["seconds"] == {"median": 1, "min": 1, "max": 1}
        assert 200 < numbers["real_tokens_per_second"] <= 256 and numbers["peak_gib"] == 0.5
    assert "no backward on the CPU" in found["flex"]["left_out"]
    assert "needs a CUDA device" in found["flash_attn"]["left_out"]
    table = capsys.readouterr().out
    assert table.count("1.00x padded") == 3 and "0.50" in table
