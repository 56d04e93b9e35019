"""The documented functions of the standard library as a data set."""

import ast
import pickle
import statistics
import textwrap

import pytest

from torchtune_packing.datasets import docstrings, python_docstrings_dataset
from torchtune_packing.datasets.docstrings import in_validation, stdlib_functions
from torchtune_packing.models.smollm2 import smollm2_tokenizer

TRICKY = '''\
    # -*- coding: utf-8 -*-
    class Outer:
        """Not a function."""

        @property
        def decorated(
            self,
        ):
            """Says it is decorated.

            Further down.
                Indented more.
            """
            # a comment
            return 1

        async def waits(self): "On one line."; return 2

        def only(self):
            r"""Nothing but a docstring."""

        def undocumented(self):
            def nested():
                """Is nested."""
                return "é", """not a docstring"""
            return nested

        def blank(self):
            """   """

    if True:
        def größe(x): "Ünïcode before the code."; return x
    else:
        try:
            pass
        except ValueError:
            def handler():
                """In a handler."""
                return 3
        match 1:
            case 1:
                def matched():
                    """In a case."""
                    return 4
'''


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return smollm2_tokenizer(str(smollm2_dir))


@pytest.fixture(scope="module")
def train(tokenizer):
    return python_docstrings_dataset(tokenizer)


@pytest.fixture(scope="module")
def validation(tokenizer):
    return python_docstrings_dataset(tokenizer, split="validation")


@pytest.fixture
def tricky(tmp_path):
    (tmp_path / "package" / "test").mkdir(parents=True)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(textwrap.dedent(TRICKY), encoding="utf-8")
    skipped = 'def skipped():\n    """Lies in a skipped folder."""\n    return 1\n'
    (tmp_path / "package" / "test" / "a.py").write_text(skipped)
    (tmp_path / "site-packages" / "a.py").write_text(skipped)
    (tmp_path / "a_broken.py").write_text("def (:\n")
    (tmp_path / "b_raises.py").write_bytes(
        b"# coding: latin-1\r\nraise SystemExit\r\n"
        b"def caf\xe9():\r\n    '''Latin.'''\r\n    return 5\r\n"
    )
    (tmp_path / "c_copy.py").write_text(
        'def nested():\n    """Is nested."""\n    return "é", """not a docstring"""\n',
        encoding="utf-8",
    )
    return stdlib_functions(str(tmp_path))


def test_functions_are_found_in_order_once_and_without_import(tricky):
    # The copy of `nested` in c_copy.py is left out; nothing of skipped or broken files is there.
    assert [(f.name, f.docstring) for f in tricky] == [
        ("b_raises.café", "Latin."),
        ("c_copy.nested", "Is nested."),
        ("package.Outer.decorated", "Says it is decorated.\n\nFurther down.\n    Indented more."),
        ("package.Outer.waits", "On one line."),
        ("package.Outer.only", "Nothing but a docstring."),
        ("package.größe", "Ünïcode before the code."),
        ("package.handler", "In a handler."),
        ("package.matched", "In a case."),
    ]


def test_source_is_the_function_without_its_docstring(tricky):
    assert {f.name.rpartition(".")[2]: f.source for f in tricky} == {
        "café": "def café():\n    return 5",
        "nested": 'def nested():\n    return "é", """not a docstring"""',
        "decorated": "@property\ndef decorated(\n    self,\n):\n    # a comment\n    return 1",
        "waits": "async def waits(self): return 2",
        "only": "def only(self):\n    pass",
        "größe": "def größe(x): return x",
        "handler": "def handler():\n    return 3",
        "matched": "def matched():\n    return 4",
    }


def test_standard_library_functions_parse_and_have_no_docstring_left():
    for function in stdlib_functions()[::3]:
        (node,) = ast.parse(function.source).body
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), function.name
        assert node.name == function.name.rpartition(".")[2]
        assert not (ast.get_docstring(node) or "").strip(), function.name
        assert function.docstring


def test_size_and_lengths(train, validation):
    num_functions = len(train) + len(validation)
    assert num_functions == len(stdlib_functions())
    assert 5_000 < num_functions < 7_500
    assert 0.05 < len(validation) / num_functions < 0.10
    lengths = [len(train[index]["tokens"]) for index in range(0, len(train), 10)]
    assert 80 < statistics.median(lengths) < 140
    assert max(lengths) < 8_192


def test_split_goes_by_the_functions_own_name(train, validation):
    names = [{f.name.rpartition(".")[2] for f in part.functions} for part in (train, validation)]
    assert not names[0] & names[1]
    # The first 32 bits of sha256("pendown") are 7 modulo 100, those of sha256("close") are 76.
    assert in_validation("turtle.TPen.pendown")
    assert in_validation("elsewhere.pendown")
    assert not in_validation("socket.socket.close")


def test_order_is_that_of_files_and_lines(train):
    modules = [f.name.partition(".")[0] for f in train.functions]
    first_seen = list(dict.fromkeys(modules))
    assert len(first_seen) > 100
    assert modules == sorted(modules, key=first_seen.index)


def test_answer_is_trained_and_prompt_is_not(train, tokenizer):
    for index in (0, 1_000, -1):
        sample = train[index]
        source, docstring = train.example(index)
        assert len(sample["tokens"]) == len(sample["labels"])
        trained = [label for label in sample["labels"] if label != -100]
        assert sample["labels"][-len(trained) :] == trained == sample["tokens"][-len(trained) :]
        assert tokenizer.decode(trained) == docstring + "<|im_end|>"
        prompt = tokenizer.decode(sample["tokens"][: -len(trained)])
        assert prompt.endswith(source + "<|im_end|>\n<|im_start|>assistant\n")
        asked, _ = tokenizer.tokenize_messages(train.messages(index), add_end_tokens=False)
        assert asked == sample["tokens"][: -len(trained)]


def test_limit_and_max_tokens(train, tokenizer):
    small = python_docstrings_dataset(tokenizer, limit=7, max_tokens=60)
    expected = (i for i in range(len(train)) if len(train[i]["tokens"]) <= 60)
    assert [small[i] for i in range(7)] == [train[next(expected)] for _ in range(7)]
    assert len(small) == 7
    assert len(python_docstrings_dataset(tokenizer, limit=5)) == 5
    with pytest.raises(IndexError):
        small[7]


def test_pickles_into_a_worker(tokenizer):
    small = python_docstrings_dataset(tokenizer, limit=3, split="validation")
    copy = pickle.loads(pickle.dumps(small))
    assert [copy[i] for i in range(3)] == [small[i] for i in range(3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split is 'test'; choose 'train' or 'validation'"),
        ({"limit": 0}, "limit is 0; it must be at least 1"),
        ({"max_tokens": -5}, "max_tokens is -5; it must be at least 1"),
    ],
)
def test_bad_arguments(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        python_docstrings_dataset(tokenizer, **arguments)


def test_nothing_left(tokenizer, tricky, monkeypatch):
    monkeypatch.setattr(docstrings, "stdlib_functions", lambda: tricky)
    with pytest.raises(ValueError, match="No documented function is left .* max_tokens=3"):
        python_docstrings_dataset(tokenizer, max_tokens=3)


def test_names_are_relative_to_the_root(tmp_path, tricky):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (tmp_path / "package" / "__init__.py").rename(other / "moved.py")
    names = [f.name for f in stdlib_functions(str(other))]
    assert "moved.Outer.decorated" in names and "moved.Outer.undocumented.nested" in names
