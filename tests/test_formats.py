"""Chat, instruct and text data through real tokenizers, trained here on a few lines, into packs.

Each tokenizer file is made by the library that reads it: SentencePiece (Llama 2, Mistral, Gemma,
Phi-3), a tiktoken rank file (Llama 3), vocab.json and merges.txt (Qwen2.5).
"""

import base64
import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import ByteLevelBPETokenizer
from torchtune import config
from torchtune.data import Message
from torchtune.models.gemma import gemma_tokenizer
from torchtune.models.llama2 import llama2_tokenizer
from torchtune.models.llama3 import llama3_tokenizer
from torchtune.models.mistral import mistral_tokenizer
from torchtune.models.phi3 import phi3_mini_tokenizer
from torchtune.models.qwen2_5 import qwen2_5_tokenizer

from tests.test_configs import ChatBytes
from torchtune_packing import PackedDataset, collate_packed
from torchtune_packing.datasets import packed_dataset
from torchtune_packing.datasets.truncation import with_exact_truncation

#: (role, text) of each turn; no word of a question is in any answer.
TALKS = [
    [("user", "where is the cat"), ("assistant", "under that table")],
    [
        ("system", "be brief"),
        ("user", "count to three"),
        ("assistant", "one two"),
        ("user", "go on"),
        ("assistant", "3 4 5 6 7 8 9 10 11 12 13 14"),
    ],
    [("user", "name a colour"), ("assistant", "dark green, or blue; perhaps 7 shades")],
]
ROLES = {"user": "human", "assistant": "gpt", "system": "system"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizer files, trained on the talks, and the talks as JSON lines in both chat forms."""
    folder = tmp_path_factory.mktemp("files")
    lines = [text for talk in TALKS for _, text in talk] * 20
    lines += ["[INST] [/INST] <<SYS>> <</SYS>> user assistant system"] * 5

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=320, min_frequency=2, show_progress=False)
    bpe.save_model(str(folder))

    # The same merges as tiktoken reads them: one token a line, as bytes, with its rank.
    letters = letters_of_bytes()
    vocabulary = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    with (folder / "ranks.model").open("wb") as file:
        for token, rank in vocabulary:
            raw = bytes(letters[letter] for letter in token)
            file.write(base64.b64encode(raw) + b" %d\n" % rank)

    with (folder / "openai.jsonl").open("w") as file:
        for talk in TALKS:
            turns = [{"role": role, "content": text} for role, text in talk]
            file.write(json.dumps({"messages": turns}) + "\n")
    with (folder / "plain.jsonl").open("w") as file:  # for templates without a system turn
        for talk in TALKS:
            turns = [{"role": role, "content": text} for role, text in talk if role != "system"]
            file.write(json.dumps({"messages": turns}) + "\n")
    with (folder / "sharegpt.jsonl").open("w") as file:
        for talk in TALKS:
            turns = [{"from": ROLES[role], "value": text} for role, text in talk]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return {path.name: path for path in folder.iterdir()} | {"cache": folder / "cache"}


def letters_of_bytes() -> dict[str, int]:
    """The byte behind each letter of a byte-level vocabulary: printable ones stand for themselves,
    the others, in order, for the letters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


#: name -> (builder, tokens that end an answer)
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], int]]] = {
    "llama2": (
        lambda files, **keys: llama2_tokenizer(str(files["tokenizer.model"]), **keys),
        lambda tokenizer: tokenizer.eos_id,
    ),
    "mistral": (
        lambda files, **keys: mistral_tokenizer(str(files["tokenizer.model"]), **keys),
        lambda tokenizer: tokenizer.eos_id,
    ),
    "gemma": (
        lambda files, **keys: gemma_tokenizer(str(files["tokenizer.model"]), **keys),
        lambda tokenizer: tokenizer.eos_id,
    ),
    "phi3": (
        lambda files, **keys: phi3_mini_tokenizer(str(files["tokenizer.model"]), **keys),
        lambda tokenizer: tokenizer.special_tokens["<|end|>"],
    ),
    "llama3": (
        lambda files, **keys: llama3_tokenizer(str(files["ranks.model"]), **keys),
        lambda tokenizer: tokenizer.eot_id,
    ),
    "qwen2_5": (
        lambda files, **keys: qwen2_5_tokenizer(
            str(files["vocab.json"]), str(files["merges.txt"]), **keys
        ),
        lambda tokenizer: tokenizer.special_tokens["<|im_end|>"],
    ),
}


def chat(files: dict[str, Path], style: str, kind: str = "") -> dict[str, Any]:
    name = "plain" if kind == "mistral" else style
    return {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": str(files[f"{name}.jsonl"]),
        "conversation_column": {"openai": "messages", "sharegpt": "conversations"}[style],
        "conversation_style": style,
        "cache_dir": str(files["cache"]),
    }


def documents(packs: PackedDataset) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of every document, pack by pack."""
    found = []
    for pack in packs:
        parts = pack["seq_lens"].tolist()
        for tokens, labels in zip(
            pack["tokens"].split(parts), pack["labels"].split(parts), strict=True
        ):
            found.append((tokens.tolist(), labels.tolist()))
    return found


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def text_of(kind: str, tokenizer: Any, tokens: list[int]) -> str:
    """Tokens back to text, without the special tokens."""
    limit = {"phi3": 32_000, "llama3": 128_000, "qwen2_5": 151_643}.get(kind, 1 << 60)
    return tokenizer.decode([t for t in tokens if t < limit and t not in (1, 2)] or [5])


@pytest.mark.parametrize("kind", list(KINDS))
def test_chat_through_template_masking_packing_and_back_to_text(
    kind: str, files: dict[str, Path]
) -> None:
    build, end_of = KINDS[kind]
    tokenizer = build(files)
    packs = packed_dataset(
        tokenizer, source=chat(files, "openai", kind), max_seq_len=256, strategy="sequential"
    )
    found = documents(packs)
    assert len(found) == 3
    for talk, (tokens, labels) in zip(TALKS, found, strict=True):
        if kind == "mistral":
            talk = [turn for turn in talk if turn[0] != "system"]
        # All of it is there, in order.
        text = squeezed(text_of(kind, tokenizer, tokens))
        places = [text.find(squeezed(part)) for _, part in talk]
        assert places == sorted(places) and places[0] >= 0
        # Only what the assistant says is trained (and the word "assistant" where a template
        # makes it part of the turn), each answer with the token that ends it.
        assert all(y in (-100, t) for y, t in zip(labels, tokens, strict=True))
        trained = [y for y in labels if y != -100]
        answers = [part for role, part in talk if role == "assistant"]
        spoken = squeezed(text_of(kind, tokenizer, trained)).replace("assistant", "")
        assert spoken == squeezed("".join(answers))
        assert trained.count(end_of(tokenizer)) >= (len(answers) if kind != "gemma" else 1)
        assert trained[-1] in (end_of(tokenizer), tokenizer.eos_id)


@pytest.mark.parametrize("kind", list(KINDS))
def test_B14_a_limit_that_cuts_nothing_changes_no_label(kind: str, files: dict[str, Path]) -> None:
    build, _ = KINDS[kind]
    node = chat(files, "openai", kind)
    free, limited = (
        documents(
            packed_dataset(
                build(files, max_seq_len=limit), source=node, max_seq_len=256, strategy="sequential"
            )
        )
        for limit in (None, 8192)
    )
    assert free == limited


@pytest.mark.parametrize("kind", list(KINDS))
def test_B14_truncation_ends_a_trained_answer_with_a_trained_end(
    kind: str, files: dict[str, Path]
) -> None:
    """The longest talk is cut within its last answer, or within its first question."""
    build, _ = KINDS[kind]
    keys = {"source": chat(files, "openai", kind), "max_seq_len": 256, "strategy": "sequential"}
    whole = documents(packed_dataset(build(files), **keys))
    longest = max(len(tokens) for tokens, _ in whole)
    limit = longest - 6
    tokenizer = build(files, max_seq_len=limit)
    for (tokens, labels), (full, full_labels) in zip(
        documents(packed_dataset(tokenizer, **keys)), whole, strict=True
    ):
        if len(full) <= limit:
            assert (tokens, labels) == (full, full_labels)
            continue
        assert tokens == [*full[: limit - 1], tokenizer.eos_id]
        assert full_labels[limit - 1] != -100  # the cut lies in an answer
        assert labels == [*full_labels[: limit - 1], tokenizer.eos_id]
    assert longest > limit
    # Cut within the question, nothing is trained, the end neither.
    short = with_exact_truncation(build(files, max_seq_len=4))
    turns = [Message(role=role, content=text, masked=True) for role, text in TALKS[0][:1]]
    turns.append(Message(role="assistant", content=TALKS[0][1][1]))
    tokens, mask = short.tokenize_messages(turns)
    assert len(tokens) == 4 and tokens[-1] == short.eos_id and all(mask)


def test_wrapped_tokenizer_is_the_tokenizer_otherwise(files: dict[str, Path]) -> None:
    plain = llama3_tokenizer(str(files["ranks.model"]), max_seq_len=9)
    wrapped = pickle.loads(pickle.dumps(with_exact_truncation(plain)))
    assert plain.max_seq_len == wrapped.max_seq_len == 9
    assert wrapped.pad_id == plain.pad_id and wrapped.encode("cat") == plain.encode("cat")
    ours = ChatBytes()
    assert with_exact_truncation(ours) is ours
    free = llama3_tokenizer(str(files["ranks.model"]))
    assert with_exact_truncation(free) is free


# --- the forms of data, on a tokenizer that is easy to read ------------------------------------


class PlainBytes(ChatBytes):
    """The byte tokenizer as text completion calls it."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [*text.encode(), *([self.eos_id] if add_eos else [])]


def trained_text(labels: list[int]) -> str:
    return "".join("$" if y == PlainBytes.eos_id else chr(y) for y in labels if y != -100)


@pytest.mark.parametrize("style", ["openai", "sharegpt"])
def test_multi_turn_chat_trains_the_answers_and_their_ends(
    style: str, files: dict[str, Path]
) -> None:
    packs = packed_dataset(
        PlainBytes(), source=chat(files, style), max_seq_len=128, strategy="sequential"
    )
    assert [trained_text(labels) for _, labels in documents(packs)] == [
        "".join(f"{text}$" for role, text in talk if role == "assistant") for talk in TALKS
    ]
    # And the batch asks no token to predict what follows its document.
    batch = collate_packed([packs[i] for i in range(len(packs))], shift_labels=True, mask=None)
    ends = batch["seq_lens"].cumsum(1) - 1
    for row, columns in enumerate(ends.tolist()):
        assert all(batch["labels"][row, column] == -100 for column in columns)


def test_instruct_and_text_completion(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text('{"q": "2+2?", "a": "four"}\n{"q": "1+1?", "a": "two"}\n')
    (tmp_path / "text.jsonl").write_text('{"text": "abc"}\n{"text": "defg"}\n')
    instruct = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "json",
        "data_files": str(tmp_path / "qa.jsonl"),
        "column_map": {"input": "q", "output": "a"},
        "cache_dir": str(files["cache"]),
    }
    text = {
        "_component_": "torchtune.datasets.text_completion_dataset",
        "source": "json",
        "data_files": str(tmp_path / "text.jsonl"),
        "cache_dir": str(files["cache"]),
    }
    common = {"max_seq_len": 200, "strategy": "sequential"}
    packs = packed_dataset(PlainBytes(), source=instruct, **common)
    assert [trained_text(labels) for _, labels in documents(packs)] == ["four$", "two$"]
    packs = packed_dataset(PlainBytes(), source=text, **common)
    # Everything is trained but the first token, which nothing predicts.
    assert [trained_text(labels) for _, labels in documents(packs)] == ["bc$", "efg$"]

    # Several sources: one after the other, in the order of the list.
    packs = packed_dataset(PlainBytes(), source=[text, instruct, chat(files, "sharegpt")], **common)
    heads = [bytes(tokens[:3]).decode() for tokens, _ in documents(packs)]
    assert heads == ["abc", "def", "2+2", "1+1", "whe", "be ", "nam"]


PREFERENCE = [
    "torchtune.datasets.preference_dataset",
    "torchtune.datasets.hh_rlhf_helpful_dataset",
    "torchtune.datasets.stack_exchange_paired_dataset",
    "torchtune.datasets.PreferenceDataset",
]
MULTIMODAL = [
    "torchtune.datasets.multimodal.multimodal_chat_dataset",
    "torchtune.datasets.multimodal.the_cauldron_dataset",
    "torchtune.datasets.multimodal.llava_instruct_dataset",
    "torchtune.datasets.multimodal.vqa_dataset",
]


@pytest.mark.parametrize("name", PREFERENCE + MULTIMODAL)
def test_preference_and_multimodal_data_are_refused_before_anything_loads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def never(*args: Any, **keys: Any) -> None:
        raise AssertionError("a data set was loaded")

    monkeypatch.setattr(datasets, "load_dataset", never)
    monkeypatch.setattr(config, "instantiate", never)
    what = "multimodal samples" if name in MULTIMODAL else "preference data"
    fine = {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"}
    for source in ({"_component_": name}, [fine, {"_component_": name}]):
        with pytest.raises(ValueError, match=f"{re.escape(name)}, which yields {what}"):
            packed_dataset(PlainBytes(), source=source, max_seq_len=64)
