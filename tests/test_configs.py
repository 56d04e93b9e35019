"""Every config: valid, known keys only, nothing repeated, and of the size that its header says."""

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from tests.conftest import REPO
from tests.tiny import ByteTokenizer
from torchtune_packing import PackedDataset
from torchtune_packing.training import preflight

CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))
OURS = [path for path in CONFIGS if path.parent.name != "stock"]
STOCK = [path for path in CONFIGS if path.parent.name == "stock"]

#: What our recipes take for a key that is left out; a config that says the same says nothing.
DEFAULTS = {
    "gradient_accumulation_steps": 1,
    "shuffle": True,
    "balance": True,
    "num_workers": 0,
    "attention_backend": "auto",
    "compile": False,
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
    "fsdp_cpu_offload": False,
    "fsdp_reshard_after_forward": True,
    "log_every_n_steps": 1,
    "loss_reduction": "token",
    "resume_from_checkpoint": False,
    "overwrite_output_dir": False,
    "require_lower_val_loss": False,
    "save_merged_weights": False,
    "max_token_loss": 0.01,
}
#: Keys that torchtune 0.6.1's recipes read.
STOCK_KEYS = frozenset(
    """
    output_dir model_dir tokenizer dataset collate_fn seed shuffle model checkpointer
    resume_from_checkpoint batch_size gradient_accumulation_steps epochs max_steps_per_epoch
    optimizer optimizer_in_bwd lr_scheduler loss compile device dtype metric_logger
    """.split()
)


def name_of(path: Path) -> str:
    return path.relative_to(REPO / "configs").with_suffix("").as_posix()


def header(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line.lstrip("# ").rstrip() for line in lines[:end]]


def load(path: Path) -> DictConfig:
    return OmegaConf.load(path)


def components(node: Any) -> Iterator[DictConfig]:
    """Every node with a ``_component_``, however deep."""
    if isinstance(node, DictConfig):
        if "_component_" in node:
            yield node
        for value in node.values():
            yield from components(value)
    elif OmegaConf.is_list(node):
        for value in node:
            yield from components(value)


def test_models_data_and_methods_are_all_there() -> None:
    names = {name_of(path) for path in CONFIGS}
    families = "smollm2/360M smollm2/1.7B llama3_2/1B llama3_2/3B llama3_1/8B qwen2_5/0.5B "
    families += "qwen2_5/1.5B qwen2_5/7B gemma2/2B phi3/mini smollm2/135M"
    wanted = {f"{family}_{method}" for family in families.split() for method in ("full", "lora")}
    wanted |= {f"{m}/7B_full_{d}" for m in ("llama2", "mistral") for d in ("orcamath", "flan")}
    for family in ("llama2/7B", "mistral/7B", "llama3_1/8B", "llama3_2/3B", "qwen2_5/7B"):
        wanted |= {f"{family}_lora", f"{family}_qlora"}
    for method in ("full", "lora"):
        wanted |= {f"stock/smollm2_{method}_{p}" for p in ("single_device", "distributed")}
    assert wanted <= names


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_header_and_keys(path: Path) -> None:
    cfg, lines = load(path), header(path)
    assert len(path.read_text().splitlines()) < 60
    text = path.read_text()
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("#"))

    # The commands at the top name this config, its recipe and its model folder.
    name = path.relative_to(REPO).as_posix()
    runs = [shlex.split(line) for line in lines if re.match(r"(PYTHONPATH=\. )?tune run ", line)]
    downloads = [shlex.split(line) for line in lines if line.startswith("tune download ")]
    assert runs and downloads
    assert any("resume_from_checkpoint=True" in line for line in lines)  # how to go on
    for words in runs:
        words = [word for word in words if word != "PYTHONPATH=."]
        assert words[words.index("--config") + 1] == name
        recipe = words[words.index("--config") - 1]
        if path in OURS:
            assert (REPO / recipe).is_file()
            wants_adapter = "lora" in path.stem
            assert recipe == f"recipes/{'lora' if wants_adapter else 'full'}_finetune.py"
        else:
            _, method, place = path.stem.split("_", 2)
            assert recipe == f"{method}_finetune_{place}"
    for words in downloads:
        assert words[words.index("--output-dir") + 1] == cfg.model_dir
        assert cfg.model_dir == "models/" + words[2].split("/")[1]

    # Only keys that somebody reads, and none that only repeats a default.
    lora = preflight.LORA_KEYS if "lora" in path.stem else frozenset()
    known = preflight.COMMON_KEYS | lora | {"model_dir"} if path in OURS else STOCK_KEYS
    assert set(cfg) <= known
    if path in OURS:
        repeated = [key for key, value in DEFAULTS.items() if cfg.get(key, None) == value]
        assert not repeated
    assert cfg.output_dir == f"runs/{name_of(path).replace('/', '_')}"
    assert OmegaConf.to_container(cfg, resolve=True)  # every ${name} is there


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_components_exist_and_take_their_keys(path: Path) -> None:
    cfg = load(path)
    config.validate(cfg)  # what `tune validate` does
    assert len(list(components(cfg))) >= 7
    for node in components(cfg):
        built_by = _get_component_from_path(node._component_)
        signature = inspect.signature(built_by)
        keys = {key: value for key, value in node.items() if key != "_component_"}
        signature.bind_partial(**keys)  # TypeError for a key that it does not take
        for key, value in keys.items():
            parameter = signature.parameters.get(key)
            if parameter is not None and parameter.default is not inspect.Parameter.empty:
                assert value != parameter.default, f"{node._component_} {key}={value} is a default"


# --- models -----------------------------------------------------------------------------------


@cache
def weights(component: str, settings: str) -> tuple[dict[str, int], int, tuple[int, ...]]:
    """Of a model on the meta device: parameters by kind, positions, and its widths."""
    with torch.device("meta"):
        model = config.instantiate(OmegaConf.create(json.loads(settings)))
    count = {"adapter": 0, "nf4": 0, "plain": 0}
    for name, parameter in model.named_parameters():
        kind = "nf4" if "NF4" in type(parameter.data).__name__ else "plain"
        count[kind] += parameter.numel()
        count["adapter"] += parameter.numel() if "lora_" in name else 0
    count["layer"] = sum(parameter.numel() for parameter in model.layers[0].parameters())
    count["outside"] = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not name.startswith("layers.")
    )
    embedding = model.tok_embeddings.weight
    widest = max(p.shape[0] for p in model.layers[0].parameters() if p.ndim == 2)
    shape = (len(model.layers), embedding.shape[1], embedding.shape[0], widest)
    return count, model.max_seq_len, shape


def described(cfg: DictConfig) -> tuple[dict[str, int], int, tuple[int, ...]]:
    settings = OmegaConf.to_container(cfg.model, resolve=True)
    return weights(cfg.model._component_, json.dumps(settings))


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_model_builds_and_fits_the_card(path: Path) -> None:
    """Weights, gradients, optimizer and the activations of a step, by arithmetic, in GB of 1e9.

    Activations are those with checkpointing of each layer: its input for every layer, what one
    layer computes in between (two wide products and some of the model's width), and one chunk of
    float32 logits with its gradient.
    """
    cfg = load(path)
    count, positions, (layers, width, vocabulary, widest) = described(cfg)
    assert cfg.dataset.max_seq_len <= positions
    # A tokenizer that cuts does so before anything is counted.
    assert cfg.dataset.overlong == "truncate" and "max_seq_len" not in cfg.tokenizer
    if path in STOCK:
        return
    trains_adapter = count["adapter"] > 0
    assert trains_adapter == ("lora" in path.stem)
    assert (count["nf4"] > 0) == ("qlora" in path.stem)
    found = re.search(r"Card: (\d) GPUs? with (\d+) GB", "\n".join(header(path)))
    if found is None:
        assert cfg.device == "cpu"
        return
    gpus, card = int(found[1]), float(found[2])
    gpus_of_command = re.search(r"--nproc_per_node (\d)", path.read_text())
    assert gpus == (int(gpus_of_command[1]) if gpus_of_command else 1)
    trained = count["adapter"] if trains_adapter else count["plain"]
    total = 2 * count["plain"] + 0.53 * count["nf4"] + (2 + 4) * trained
    if gpus > 1:  # sharded; two layers are gathered at a time, and what is outside of layers
        total = total / gpus + 2 * 2 * count["layer"] + 2 * count["outside"]
    tokens = cfg.batch_size * cfg.dataset.max_seq_len
    total += 2 * tokens * width * layers
    total += 2 * tokens * (4 * widest + 12 * width)
    total += 2 * 4 * tokens * vocabulary / cfg.get("num_output_chunks", 1)
    total = total / 1e9 + 1.0  # and the CUDA context
    assert total < 0.92 * card, f"needs {total:.1f} GB of {card}"
    # Nor is a card named that is far larger than needed.
    assert total > 0.25 * card, f"needs only {total:.1f} GB of {card}"


# --- data -------------------------------------------------------------------------------------

SAMPLES = {
    "yahma/alpaca-cleaned": [
        {"instruction": "Add.", "input": f"{i} and 1", "output": f"It is {i + 1}."}
        for i in range(3)
    ],
    "microsoft/orca-math-word-problems-200k": [
        {"question": f"What is {i} and 1?", "answer": f"It is {i + 1}."} for i in range(3)
    ],
    "Muennighoff/flan": [
        {"inputs": f"What is {i} and 1?", "targets": f"It is {i + 1}.", "task": "sums"}
        for i in range(3)
    ],
    "messages": [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} and 1?"},
                {"role": "assistant", "content": f"It is {i + 1}."},
            ]
        }
        for i in range(3)
    ],
    "conversations": [
        {
            "conversations": [
                {"from": "human", "value": f"What is {i} and 1?"},
                {"from": "gpt", "value": f"It is {i + 1}."},
            ]
        }
        for i in range(3)
    ],
}


class ChatBytes(ByteTokenizer):
    """The byte tokenizer with the method that torchtune's data sets call."""

    def tokenize_messages(
        self, messages: list[Any], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        tokens, mask = [], []
        for message in messages:
            piece = [*self.encode(message.text_content), self.eos_id]
            tokens += piece
            mask += [message.masked] * len(piece)
        return tokens, mask

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        sample["tokens"], sample["mask"] = self.tokenize_messages(sample.pop("messages"))
        return sample


def test_every_data_set_builder_runs_on_samples_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the answers are trained, in every config; hub files are replaced by three samples."""
    import torchtune.datasets._sft

    def hub(source: str, **keys: Any) -> Dataset:
        assert set(keys) <= {"split", "data_files", "data_dir", "name"}
        return Dataset.from_list(SAMPLES[source])

    real = torchtune.datasets._sft.load_dataset
    seen = set()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in CONFIGS:
        node = load(path).dataset
        source = node.source
        builder = source._component_.rsplit(".", 1)[1]
        if builder == "python_docstrings_dataset":
            continue  # it has its own tests, and needs no network
        key = json.dumps(OmegaConf.to_container(source), sort_keys=True)
        if key in seen:
            continue
        seen.add(key)
        if source.get("source") == "json":
            rows = SAMPLES[source.conversation_column]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / source.data_files).write_text(lines)
            monkeypatch.setattr(torchtune.datasets._sft, "load_dataset", real)
        else:
            monkeypatch.setattr(torchtune.datasets._sft, "load_dataset", hub)
        node = OmegaConf.merge(node, {"max_seq_len": 2048})
        node.pop("cache_dir", None)
        packs = config.instantiate(node, ChatBytes())
        assert isinstance(packs, PackedDataset)
        labels = torch.cat([pack["labels"] for pack in packs])
        text = ByteTokenizer().decode(labels[labels != -100].tolist())
        assert sorted(re.findall(r"It is \d\.", text)) == ["It is 1.", "It is 2.", "It is 3."]
        assert len(text) == 3 * len("It is 1."), f"{name_of(path)} trains on {text!r}"
    assert len(seen) >= 5
