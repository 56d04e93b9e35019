"""packed_dataset: what a config may say, what is refused by name, and keys of stores."""

import importlib.util
import json
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchtune
from omegaconf import OmegaConf
from torchtune import config
from torchtune.data import Message, PromptTemplate

from tests.helpers import D
from torchtune_packing import PackedDataset
from torchtune_packing.datasets import packed_dataset
from torchtune_packing.datasets.packed import build_store
from torchtune_packing.datasets.source_key import source_key
from torchtune_packing.datasets.sources import source_nodes
from torchtune_packing.store import SampleReadError, TokenStore


class ByteTokenizer:
    """A token is a byte plus 3; 0 pads, 1 begins, 2 ends. With torchtune's attributes."""

    def __init__(
        self,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplate | None = None,
        vocabulary: dict[str, int] | None = None,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.vocabulary = vocabulary or {"a": 1}
        self.pad_id, self.bos_id, self.eos_id = 0, 1, 2
        self._header_cache: dict[str, list[int]] = {}

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        body = [byte + 3 for byte in text.encode()]
        return [1] * add_bos + body + [2] * add_eos

    def tokenize_messages(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        tokens, mask = [1], [True]
        for message in messages:
            self._header_cache.setdefault(message.role, [1])
            part = [byte + 3 for byte in message.text_content.encode()]
            tokens += part
            mask += [message.masked] * len(part)
        tokens, mask = [*tokens, 2], [*mask, messages[-1].masked]
        return tokens[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        tokens, mask = self.tokenize_messages(sample.pop("messages"))
        return sample | {"tokens": tokens, "mask": mask}


def numbers_dataset(tokenizer: Any, lens: list[int] | None = None, **_: Any) -> D:
    """A builder with samples of the given lengths."""
    return D(lens if lens is not None else [3, 2])


BUILT: list[str] = []


def counted_dataset(tokenizer: Any) -> D:
    """A builder that leaves a mark every time it is called."""
    BUILT.append("x")
    return D([3, 2, 4])


NUMBERS = {"_component_": f"{__name__}.numbers_dataset"}
INSTRUCT = {
    "_component_": "torchtune.datasets.instruct_dataset",
    "source": "json",
    "split": "train",
    "column_map": {"input": "question", "output": "answer"},
}


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A JSONL file, and a place of its own for what Hugging Face's library makes of it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    path = tmp_path / "questions.jsonl"
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "ab", "answer": "cde"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(source: Any, tokenizer: Any = None, **keys: Any) -> PackedDataset:
    """What a recipe does: the whole node through torchtune's instantiate."""
    node = {
        "_component_": "torchtune_packing.datasets.packed_dataset",
        "source": source,
        "max_seq_len": 16,
        "strategy": "sequential",
    }
    return config.instantiate(OmegaConf.create(node | keys), tokenizer or ByteTokenizer())


def test_a_config_node_becomes_packs(questions: Path) -> None:
    ds = build(INSTRUCT | {"data_files": str(questions)}, max_seq_len=32)
    assert len(ds) == 1
    question, answer = [byte + 3 for byte in b"1+1?"], [ord("2") + 3, 2]
    second = [byte + 3 for byte in b"abcde"] + [2]
    assert ds[0]["tokens"].tolist() == [1, *question, *answer, 1, *second]
    assert ds[0]["labels"].tolist() == [-100] * 5 + answer + [-100] * 3 + second[2:]
    assert ds[0]["seq_lens"].tolist() == [7, 7]
    assert ds.padding_idx == 0


def test_a_built_data_set_and_a_list_of_sources_are_taken() -> None:
    assert len(packed_dataset(ByteTokenizer(), source=D([3, 2]), max_seq_len=8)) == 1
    ds = build([NUMBERS, NUMBERS | {"lens": [4]}])
    assert ds.store.seq_lens.tolist() == [3, 2, 4]
    mixed = packed_dataset(ByteTokenizer(), source=[D([5]), NUMBERS], max_seq_len=8)
    assert mixed.store.seq_lens.tolist() == [5, 3, 2]


def test_every_key_reaches_the_data_set(tmp_path: Path) -> None:
    keys = {
        "strategy": "best_fit",
        "overlong": "truncate",
        "split_across_pack": False,
        "max_packs": 1,
        "seed": 7,
        "labels_are_shifted": True,
        "num_workers": 1,
        "cache_dir": str(tmp_path),
    }
    ds = build(NUMBERS | {"lens": [3, 9, 2]}, max_seq_len=8, **keys)
    assert len(ds) == 1
    assert (ds.strategy, ds.overlong, ds.seed, ds.max_packs) == ("best_fit", "truncate", 7, 1)
    assert ds.store.labels.tolist()[:3] == [-100, 100, 101]
    assert ds.store.path is not None and ds.store.path.parent == tmp_path
    assert len(build([NUMBERS], max_seq_len=4, split_across_pack=True)) == 2


def stock_recipe() -> Any:
    """torchtune's own single-device recipe, from its file: its package raises on import."""
    path = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("stock_full_finetune", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_B56_the_same_block_works_in_a_stock_torchtune_recipe() -> None:
    recipe = SimpleNamespace(
        _tokenizer=ByteTokenizer(), _loss_fn=SimpleNamespace(ignore_index=-100)
    )
    cfg = OmegaConf.create(
        {
            "dataset": {
                "_component_": "torchtune_packing.datasets.packed_dataset",
                "source": NUMBERS | {"lens": [3, 2, 4, 1]},
                "max_seq_len": 6,
                "strategy": "sequential",
            }
        }
    )
    loader = stock_recipe().FullFinetuneRecipeSingleDevice._setup_data(
        recipe,
        cfg.dataset,
        shuffle=False,
        batch_size=2,
        collate_fn="torchtune_packing.collate_packed",
    )
    assert isinstance(loader.dataset, PackedDataset)
    (batch,) = list(loader)
    assert set(batch) == {"tokens", "labels", "input_pos", "mask"}
    assert batch["tokens"].tolist() == [[100, 101, 102, 200, 201], [300, 301, 302, 303, 400]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert not batch["mask"][0, 3, :3].any()


def test_columns_that_the_data_does_not_have_are_named_with_those_that_it_has(
    questions: Path,
) -> None:
    node = INSTRUCT | {"data_files": str(questions), "column_map": {"input": "q", "output": "a"}}
    with pytest.raises(ValueError) as caught:
        build(node)
    assert "asks its first sample for 'q'" in str(caught.value)
    assert "the columns of the data are question, answer" in str(caught.value)
    assert "dataset.source.column_map" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (INSTRUCT | {"packed": True}, "dataset.source.packed is True for torchtune.datasets"),
        ({"_component_": "torchtune.datasets.preference_dataset"}, "preference data"),
        ({"_component_": "torchtune.datasets.hh_rlhf_helpful_dataset"}, "preference data"),
        ({"_component_": "torchtune.datasets.stack_exchange_paired_dataset"}, "preference data"),
        ({"_component_": "torchtune.datasets.PreferenceDataset"}, "preference data"),
        ({"_component_": "torchtune.datasets.multimodal.the_cauldron_dataset"}, "multimodal"),
        ({"_component_": "torchtune.datasets.multimodal.vqa_dataset"}, "multimodal"),
        ({"_component_": "torchtune.datasets.PackedDataset"}, "packs already"),
        ({"_component_": "torchtune.datasets.no_such"}, "torchtune.datasets has no no_such"),
        ({"_component_": "no_such_module.x"}, "no package no_such_module is installed"),
        ({"source": "json"}, r"the keys \['source'\] but no _component_"),
        (None, "dataset.source is None; give it a data set builder"),
        ([], r"dataset.source is \[\]; give it a data set builder"),
        ("alpaca", "dataset.source is 'alpaca'; it must be a config node"),
        (INSTRUCT | {"data_files": "no/such.jsonl"}, "names no/such.jsonl, which does not exist"),
        (INSTRUCT | {"data_files": {"train": ["no/such*.jsonl"]}}, "no/such.*which does not exist"),
    ],
)
def test_B56_B57_what_cannot_be_packed_is_refused_by_name(
    source: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchtune_packing.datasets.packed.load_source",
        lambda *_: pytest.fail("loaded before it was refused"),
    )
    with pytest.raises(ValueError, match=message):
        build(source)


def test_a_builder_that_packs_or_prefers_in_disguise_is_refused() -> None:
    class PreferenceDataset(D):
        pass

    module = sys.modules[__name__]
    module.disguised_dataset = lambda tokenizer: PreferenceDataset([1])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="built a PreferenceDataset; packed_dataset needs"):
        build({"_component_": f"{__name__}.disguised_dataset"})


def test_samples_of_preference_and_multimodal_data_are_refused() -> None:
    for sample, words in (
        ({"chosen_input_ids": [1], "rejected_input_ids": [2]}, "preference data"),
        ({"tokens": [1], "labels": [1], "encoder_input": {}}, "multimodal"),
    ):
        with pytest.raises(ValueError, match=f"sample 0 .*{words}"):
            packed_dataset(ByteTokenizer(), source=[[sample]], max_seq_len=8)


def test_B57_missing_max_seq_len_names_both_keys() -> None:
    with pytest.raises(ValueError, match=r"dataset.max_seq_len .*tokenizer.max_seq_len"):
        build(NUMBERS, max_seq_len=None)
    for value in (0, -1, "long"):
        with pytest.raises(ValueError, match="max_seq_len is"):
            build(NUMBERS, max_seq_len=value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "bestfit"}, "strategy is 'bestfit'"),
        ({"overlong": "cut"}, "overlong is 'cut'"),
        ({"max_packs": 0}, "max_packs is 0"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"num_workers": -1}, "num_workers is -1"),
    ],
)
def test_settings_of_the_plan_are_refused_before_anything_is_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    settings = {"source": {"_component_": f"{__name__}.counted_dataset"}, "max_seq_len": 8}
    settings |= {"cache_dir": str(tmp_path)} | changes
    BUILT.clear()
    with pytest.raises(ValueError, match=message):
        packed_dataset(ByteTokenizer(), **settings)
    with pytest.raises(ValueError, match=message):
        build_store(ByteTokenizer(), settings)
    del settings["cache_dir"]
    with pytest.raises(ValueError, match=message):
        packed_dataset(ByteTokenizer(), **settings)
    assert not BUILT and not list(tmp_path.iterdir())


def test_samples_that_the_tokenizer_cut_are_told_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lengths 3, 8, 5, 8 under limits of 8, 9 and none: two documents were probably cut."""
    node = NUMBERS | {"lens": [3, 8, 5, 8]}
    for limit in (8, 9, None):
        build(node, ByteTokenizer(max_seq_len=limit))
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    [line] = [line for line in told if "tokenizer" in line]
    assert "2 of 4 documents have exactly tokenizer.max_seq_len=8 tokens" in line
    assert "dataset.overlong" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", r"is not JSON: line 1 starts with 'not json'"),
        ('{"question": "a", "answer": "b"}\n{"question": \n', r"is not JSON: line 2 starts with"),
        ("", "is not JSON: it is empty|no samples|could not be built"),
        (b"\xff\xfe\x00", "is not JSON: line 1 is not UTF-8 text"),
    ],
)
def test_a_data_file_that_is_not_json_is_told_by_name_and_line(
    questions: Path, content: str | bytes, message: str
) -> None:
    questions.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        build(INSTRUCT | {"data_files": str(questions)})


def test_an_unknown_key_of_the_source_is_told(questions: Path) -> None:
    with pytest.raises(ValueError, match="could not be built .*no_such_key"):
        build({"_component_": "tests.helpers.D", "no_such_key": 1})
    with pytest.raises(TypeError, match="no_such_key"):
        build(NUMBERS, no_such_key=1)


def test_a_column_that_is_missing_is_told_with_the_sample(questions: Path) -> None:
    source = INSTRUCT | {"data_files": str(questions), "column_map": {"input": "q", "output": "a"}}
    with pytest.raises((ValueError, SampleReadError), match="q"):
        build(source)


# ---- keys --------------------------------------------------------------------------------------


def key_of(source: Any, tokenizer: Any = None, shifted: bool = False) -> str:
    """The key of a config."""
    nodes = source_nodes(OmegaConf.create({"source": source}).source)
    return source_key(nodes, tokenizer or ByteTokenizer(), labels_are_shifted=shifted)[0]


def test_B55_what_changes_the_tokens_changes_the_key(questions: Path, tmp_path: Path) -> None:
    source = INSTRUCT | {"data_files": str(questions)}
    keys = {
        "as it is": key_of(source),
        "tokenizer's vocabulary": key_of(source, ByteTokenizer(vocabulary={"a": 2})),
        "tokenizer's length": key_of(source, ByteTokenizer(max_seq_len=8)),
        "template": key_of(source, ByteTokenizer(prompt_template=TEMPLATE_A)),
        "another template": key_of(source, ByteTokenizer(prompt_template=TEMPLATE_B)),
        "masking": key_of(source | {"train_on_input": True}),
        "system prompt": key_of(source | {"new_system_prompt": "Be brief."}),
        "columns": key_of(source | {"column_map": {"input": "answer", "output": "question"}}),
        "split": key_of(source | {"split": "train[:1]"}),
        "builder": key_of(source | {"_component_": "torchtune.datasets.chat_dataset"}),
        "shift": key_of(source, shifted=True),
        "two of them": key_of([source, source]),
    }
    questions.write_text(questions.read_text().replace("cde", "cdf"))
    keys["content of the file"] = key_of(source)
    assert len(set(keys.values())) == len(keys), keys


TEMPLATE_A = PromptTemplate({"user": ("Q: ", "\n"), "assistant": ("", "")})
TEMPLATE_B = PromptTemplate({"user": ("Question: ", "\n"), "assistant": ("", "")})


def test_B55_the_version_of_a_library_and_the_code_of_a_builder_change_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchtune_packing.datasets.source_key as module

    before = key_of(NUMBERS)
    for library in ("torchtune", "tokenizers", "sentencepiece", "tiktoken", "datasets"):
        with monkeypatch.context() as patch:
            known = module.version
            patch.setattr(module, "version", lambda n, k=known, x=library: k(n) + "x" * (n == x))
            assert key_of(NUMBERS) != before, library
    docstrings = {"_component_": "torchtune_packing.datasets.python_docstrings_dataset"}
    with monkeypatch.context() as patch:
        same, old = key_of(NUMBERS), key_of(docstrings)
        patch.setattr(module.platform, "python_version", lambda: "3.99.0")
        assert key_of(NUMBERS) == same and key_of(docstrings) != old

    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for number in (1, 2):
        name = "my_builders_of_this_test"
        (tmp_path / f"{name}.py").write_text(f"def build(tokenizer):\n    return [{number}]\n")
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        keys.append(key_of({"_component_": f"{name}.build"}))
    assert keys[0] != keys[1]


def test_B55_what_does_not_change_the_tokens_does_not_change_the_key(
    questions: Path, tmp_path: Path
) -> None:
    before = key_of(INSTRUCT | {"data_files": str(questions)})
    moved = tmp_path / "elsewhere" / "questions.jsonl"
    moved.parent.mkdir()
    shutil.copy(questions, moved)
    assert key_of(INSTRUCT | {"data_files": str(moved)}) == before
    reordered = dict(reversed((INSTRUCT | {"data_files": str(questions)}).items()))
    assert key_of(reordered) == before


def test_B55_functions_are_told_apart_by_their_code() -> None:
    def bound(value: int) -> Any:
        return lambda sample: sample + value

    pair = [lambda sample: sample, lambda sample: not sample]
    functions = [bound(1), bound(2), *pair, lambda sample, limit=3: limit]
    keys = {key_of(NUMBERS, ByteTokenizer(vocabulary={"f": f})) for f in functions}
    assert len(keys) == 5
    assert key_of(NUMBERS, ByteTokenizer(vocabulary={"f": bound(1)})) in keys


def test_B55_a_tokenizer_that_was_used_before_has_the_same_key() -> None:
    tokenizer = ByteTokenizer()
    before = key_of(NUMBERS, tokenizer)
    tokenizer.tokenize_messages([Message(role="user", content="a")])
    assert tokenizer._header_cache and key_of(NUMBERS, tokenizer) == before


def test_B55_packing_settings_share_one_store(tmp_path: Path) -> None:
    BUILT.clear()
    source = {"_component_": f"{__name__}.counted_dataset"}
    cache = str(tmp_path / "cache")
    plain = {"max_seq_len": 8, "cache_dir": cache}
    for change in (
        {},
        {"max_seq_len": 5},
        {"strategy": "best_fit"},
        {"seed": 3},
        {"num_workers": 1},
        {"overlong": "drop"},
        {"split_across_pack": True, "max_seq_len": 4},
        {"max_packs": 1},
    ):
        build(source, **(plain | change))
    assert BUILT == ["x"]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.name[0] != "."]) == 1


def test_B55_hub_revision_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    alpaca = {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"}
    unknown = key_of(alpaca)
    assert "The revision of yahma/alpaca-cleaned is not known" in caplog.text
    reference = tmp_path / "datasets--yahma--alpaca-cleaned" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("1" * 40)
    first = key_of(alpaca)
    reference.write_text("2" * 40)
    second = key_of(alpaca)
    pinned = key_of(alpaca | {"revision": "3" * 40})
    assert len({unknown, first, second, pinned}) == 4


def test_an_object_that_cannot_be_described_asks_for_a_key(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer(vocabulary={"opaque": (x for x in [])})
    with pytest.raises(ValueError, match="cannot be computed over a builtins.generator.*cache_key"):
        build(NUMBERS, tokenizer, cache_dir=str(tmp_path))
    ds = build(NUMBERS, tokenizer, cache_dir=str(tmp_path), cache_key="mine")
    assert ds.store.path == tmp_path / "mine"


def write_tokenizer_files(folder: Path) -> None:
    """The smallest vocabularies that load, one of each kind that torchtune has."""
    import base64

    import sentencepiece

    ranks = folder / "tokenizer.model"
    ranks.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and the dog ran over the hill\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "spm"),
        vocab_size=22,
        minloglevel=2,
        pad_id=3,
    )
    vocabulary = {chr(code): code for code in range(33, 127)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


def tiny_tokenizers(folder: Path) -> dict[str, Any]:
    """Torchtune's tokenizers over those files."""
    from torchtune.models.gemma import gemma_tokenizer
    from torchtune.models.llama3 import llama3_tokenizer
    from torchtune.models.qwen2 import qwen2_tokenizer

    return {
        "tiktoken": llama3_tokenizer(str(folder / "tokenizer.model")),
        "sentencepiece": gemma_tokenizer(str(folder / "spm.model")),
        "bpe": qwen2_tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")),
    }


def test_B55_the_content_of_tokenizer_files_is_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_tokenizer_files(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, again = tiny_tokenizers(tmp_path / "a"), tiny_tokenizers(tmp_path / "b")
    for kind in first:
        assert key_of(NUMBERS, first[kind]) == key_of(NUMBERS, again[kind]), kind
    assert len({key_of(NUMBERS, tokenizer) for tokenizer in first.values()}) == 3
    for kind, tokenizer in first.items():
        before = key_of(NUMBERS, tokenizer)
        tokenizer.encode("abc")
        assert key_of(NUMBERS, tokenizer) == before, kind
        tokenizer.max_seq_len = 5
        assert key_of(NUMBERS, tokenizer) != before, kind

    ranks = (tmp_path / "a" / "tokenizer.model").read_text().splitlines()
    ranks[0], ranks[1] = ranks[0].split()[0] + " 1", ranks[1].split()[0] + " 0"
    # Under a new name: tiktoken remembers the content of a path.
    (tmp_path / "swapped.model").write_text("\n".join([ranks[1], ranks[0], *ranks[2:]]))
    from torchtune.models.llama3 import llama3_tokenizer

    swapped = llama3_tokenizer(str(tmp_path / "swapped.model"))
    assert key_of(NUMBERS, swapped) != key_of(NUMBERS, again["tiktoken"])


def test_a_damaged_store_is_built_again_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build(NUMBERS, cache_dir=str(tmp_path))
    (first.store.path / "tokens.npy").write_bytes(b"short")
    again = build(NUMBERS, cache_dir=str(tmp_path))
    assert again[0]["tokens"].tolist() == [100, 101, 102, 200, 201]
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    assert "A damaged token store is built again" in caplog.text
    assert isinstance(again.store, TokenStore)


def test_batches_of_a_stored_data_set_are_the_same_from_workers(tmp_path: Path) -> None:
    ds = build(NUMBERS | {"lens": [3, 5, 2, 7, 1, 4] * 5}, cache_dir=str(tmp_path), max_seq_len=8)
    loader = torch.utils.data.DataLoader(ds, batch_size=None, num_workers=2)
    for mine, theirs in zip(ds, loader, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_store_built_ahead_is_what_the_data_set_opens(tmp_path: Path) -> None:
    BUILT.clear()
    node = OmegaConf.create(
        {
            "_component_": "torchtune_packing.datasets.packed_dataset",
            "source": {"_component_": f"{__name__}.counted_dataset"},
            "max_seq_len": 8,
            "cache_dir": str(tmp_path),
        }
    )
    ahead = build_store(ByteTokenizer(), node, shard_size=2)
    ds = config.instantiate(node, ByteTokenizer())
    assert ds.store.path == ahead.path and BUILT == ["x"]
    assert contents(ahead.path) == contents_of_one_build(node, tmp_path / "other")
    del node.cache_dir
    with pytest.raises(ValueError, match="dataset.cache_dir is not set"):
        build_store(ByteTokenizer(), node)
    node.source.packed = True
    node.cache_dir = str(tmp_path)
    with pytest.raises(ValueError, match="dataset.source.packed is True"):
        build_store(ByteTokenizer(), node)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def contents_of_one_build(node: Any, cache: Path) -> dict[str, bytes]:
    """The store that one process makes of the same config."""
    other = OmegaConf.merge(node, {"cache_dir": str(cache)})
    return contents(config.instantiate(other, ByteTokenizer()).store.path)


def test_torchtunes_own_data_sets_bring_a_key(questions: Path, tmp_path: Path) -> None:
    from torchtune.datasets import instruct_dataset

    def stored(**keys: Any) -> Path:
        tokenizer = ByteTokenizer(max_seq_len=keys.pop("max_seq_len", None))
        settings = {k: v for k, v in INSTRUCT.items() if k != "_component_"} | keys
        ds = instruct_dataset(tokenizer, data_files=str(questions), **settings)
        return PackedDataset(ds, max_seq_len=32, cache_dir=tmp_path / "cache").store.path

    first = stored()
    assert first.name.startswith("SFTDataset-") and stored() == first
    others = [stored(max_seq_len=9), stored(train_on_input=True), stored(new_system_prompt="s")]
    assert len({first, *others}) == 4
