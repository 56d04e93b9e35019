"""A model, a tokenizer and data small enough to train in a blink, built from the real parts.

The components are named in configs (``tests.tiny.ByteTokenizer``), so recipes run on them in this
process or in processes of their own.
"""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2

from torchtune_packing.models.smollm2 import builders

VOCAB, DIM, HEADS, KV_HEADS, LAYERS = 260, 32, 4, 2, 2
SHAPE = {
    "vocab_size": VOCAB,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "embed_dim": DIM,
    "max_seq_len": 256,
    "intermediate_dim": 64,
}


def tiny_model(**changes: Any) -> torch.nn.Module:
    """A two-layer Llama with tied embeddings and grouped-query heads."""
    return llama3_2(**(SHAPE | changes))


def tiny_lora_model(**lora: Any) -> torch.nn.Module:
    """The same with adapters; keywords as torchtune's LoRA builders have them."""
    return lora_llama3_2(**SHAPE, **lora)


class ByteTokenizer:
    """One token per byte; 256 ends a text, 257 pads."""

    eos_id, pad_id, vocab_size = 256, 257, VOCAB
    stop_tokens = [256]

    def __init__(self, max_seq_len: int | None = None) -> None:
        self.max_seq_len = max_seq_len

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


class Sums:
    """Questions like "12+7=" whose answers alone are trained; lengths vary with a comment."""

    def __init__(
        self,
        tokenizer: ByteTokenizer,
        *,
        num_samples: int = 200,
        seed: int = 0,
        trained: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.num_samples = num_samples
        self.trained = trained

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        draw = random.Random(f"{self.seed}/{index}")
        a, b = draw.randrange(100), draw.randrange(100)
        prompt = self.tokenizer.encode("x" * draw.randrange(30) + f"{a}+{b}=")
        answer = [*self.tokenizer.encode(str(a + b)), self.tokenizer.eos_id]
        labels = [-100] * len(prompt) + (answer if self.trained else [-100] * len(answer))
        return {"tokens": prompt + answer, "labels": labels}


def tiny_smollm2(**lora: Any) -> torch.nn.Module:
    """A two-layer SmolLM2 wide enough for NF4 blocks; with keywords, a QLoRA model of it."""
    size = builders._Size(2, 4, 4, 64, 128, 100_000)
    if not lora:
        return builders._decoder(size, builders._plain_linear)
    return builders._lora_decoder(
        size,
        list(lora["lora_attn_modules"]),
        lora["apply_lora_to_mlp"],
        False,
        rank=lora["lora_rank"],
        alpha=lora["lora_alpha"],
        dropout=0.0,
        use_dora=False,
        quantize_base=True,
    )


def write_tiny_checkpoint(
    folder: Path, seed: int = 0, build: Callable[[], torch.nn.Module] = tiny_model
) -> Path:
    """A folder as Hugging Face has it, holding a freshly drawn tiny model."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    model = build()
    heads, kv_heads = model.num_heads, model.layers[0].attn.num_kv_heads
    dim = model.tok_embeddings.embedding_dim
    weights = tune_to_hf(model.state_dict(), num_heads=heads, num_kv_heads=kv_heads, dim=dim)
    weights = {name: value.contiguous() for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": model.layers[0].mlp.w1.out_features,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": len(model.layers),
        "vocab_size": model.tok_embeddings.num_embeddings,
        "max_position_embeddings": SHAPE["max_seq_len"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def tiny_config(folder: Path, **changes: Any) -> DictConfig:
    """The config of a full finetuning run on the tiny model; ``changes`` are dotlist overrides."""
    base = folder / "base"
    if not base.exists():
        write_tiny_checkpoint(base)
    dataset = {
        "_component_": "torchtune_packing.datasets.packed_dataset",
        "max_seq_len": 64,
        "source": {"_component_": "tests.tiny.Sums"},
    }
    config = OmegaConf.create(
        {
            "output_dir": str(folder / "out"),
            "tokenizer": {"_component_": "tests.tiny.ByteTokenizer"},
            "dataset": dataset,
            "model": {"_component_": "tests.tiny.tiny_model"},
            "checkpointer": {
                "_component_": "torchtune.training.FullModelHFCheckpointer",
                "checkpoint_dir": str(base),
                "checkpoint_files": ["model.safetensors"],
                "model_type": "LLAMA3_2",
                "output_dir": "${output_dir}",
            },
            "device": "cpu",
            "dtype": "fp32",
            "seed": 1,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "epochs": 2,
            "max_steps_per_epoch": 6,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 2,
            },
            "clip_grad_norm": 1.0,
            "metric_logger": {
                "_component_": "tests.tiny.JsonLines",
                "path": "${output_dir}/metrics.jsonl",
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


class JsonLines:
    """A metric logger that appends each step to a file at once, exact to the last bit.

    ``delay`` seconds a step make a run long enough to be hit by a signal.
    """

    def __init__(self, path: str, delay: float = 0.0) -> None:
        self.path, self.delay = Path(path), delay
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log_config(self, config: DictConfig) -> None:
        pass

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **payload}) + "\n")
        time.sleep(self.delay)

    def close(self) -> None:
        pass


def read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """What ``JsonLines`` wrote into a run's folder; the last word on each step counts."""
    found: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], {}).update(entry)
    return found


class Hundreds:
    """Samples of one length, all of it trained."""

    def __init__(self, tokenizer: ByteTokenizer, *, num_samples: int, length: int = 100) -> None:
        self.num_samples, self.length = num_samples, length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = [(index + t) % 256 for t in range(self.length)]
        return {"tokens": tokens, "labels": list(tokens)}
