"""Every shell and Python block of the README and the docs: run, or checked, or marked.

A block that needs a GPU, the network or a program of its own carries a line above its fence:

    <!-- not run: needs Spark -->

Python blocks of one page run in order in one namespace, in an empty folder. Shell blocks have their
recipes, configs, overrides, modules and make targets checked, marked ones too. Those that a reader
types on data of their own run here on small data; the others start what other tests run.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from recipes.full_finetune import FullFinetuneRecipe
from recipes.pack import KEYS
from tests.test_configs import ChatBytes
from tests.tiny import ByteTokenizer, Sums, tiny_config, write_tiny_checkpoint
from torchtune_packing import PackedDataset
from torchtune_packing.store import __main__ as store_command
from torchtune_packing.training import preflight

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
#: Programs whose arguments are the reader's own.
FREE = {"cd", "export", "git", "ls", "pip", "#"}
OWN_KEYS = {"check_packs", "check_output"} | KEYS


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    reason: str


def blocks(page: Path) -> Iterator[Block]:
    lines, i, reason = page.read_text().splitlines(), 0, ""
    while i < len(lines):
        if mark := re.fullmatch(r"<!-- not run: (.+) -->", lines[i].strip()):
            reason = mark[1]
        elif fence := re.match(r"(\s*)```(\w*)", lines[i]):
            indent, start = len(fence[1]), i
            i += 1
            body = []
            while lines[i].strip() != "```":
                body.append(lines[i][indent:])
                i += 1
            yield Block(page.name, start + 1, fence[2], "\n".join(body), reason)
            reason = ""
        elif lines[i].strip():
            reason = ""
        i += 1


ALL = [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, without variables in front."""
    found = []
    text = re.sub(r"<[^<>\n]+>", "PLACEHOLDER", block.text.replace("\\\n", " "))
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


def is_shell(block: Block) -> bool:
    """Marked as shell, or not marked and a command of ours."""
    if block.language:
        return block.language in ("bash", "sh", "shell", "console")
    return bool(re.match(r"(#.*\n)*(PYTHONPATH=|tune |python |make |pip )", block.text))


def check_tune_run(words: list[str], copies: set[str]) -> None:
    script = next(
        word for word in words if word.endswith(".py") or "/" in word or "finetune" in word
    )
    if script.endswith(".py"):
        assert (REPO / script).is_file() or script in copies, f"{script} does not exist"
    if "--config" not in words:
        return
    place = words.index("--config") + 1
    name, overrides = words[place], words[place + 1 :]
    assert all("=" in word for word in overrides), overrides
    if not name.startswith("configs/"):  # the reader's own
        return
    cfg = OmegaConf.merge(OmegaConf.load(REPO / name), OmegaConf.from_dotlist(overrides))
    if not script.endswith(".py"):  # a recipe of torchtune's, which has other keys
        return
    known = preflight.COMMON_KEYS | preflight.LORA_KEYS | OWN_KEYS
    problems = list(preflight.unknown_keys(OmegaConf.to_container(cfg, resolve=False), known))
    problems += preflight.dataset_problems(cfg)
    assert not problems, problems
    for override in overrides:
        key, _, value = override.partition("=")
        if key.endswith("_component_"):
            _get_component_from_path(value)


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in ALL:
        if block.page == page and block.language == "python" and not block.reason:
            code = compile("\n" * block.line + block.text, str(page), "exec")
            torch.manual_seed(0)
            exec(code, namespace)


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_shell_blocks_name_what_exists(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    copies: set[str] = set()
    for block in ALL:
        if block.page != page or not is_shell(block):
            continue
        for words in commands(block):
            where = f"{page}:{block.line}: {' '.join(words)}"
            if words[:2] == ["tune", "run"]:
                check_tune_run(words[2:], copies)
            elif words[:2] in (["tune", "download"], ["tune", "ls"], ["tune", "cp"]):
                pass
            elif words[0] in ("python", "python3") and words[1] == "-m":
                assert importlib.util.find_spec(words[2]) is not None, where
            elif words[0] == "make":
                assert all(word in targets or "=" in word for word in words[1:]), where
            elif words[0] == "cp":
                assert (REPO / words[1]).is_file(), where
                copies.add(words[2])
            else:
                assert words[0] in FREE, f"{where}: mark the block, or teach the test this command"


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_yaml_blocks_name_components_that_exist(page: str) -> None:
    for block in ALL:
        if block.page == page and block.language == "yaml" and not block.reason:
            yaml.safe_load(block.text)
            for component in re.findall(r"_component_: ([\w.]+)", block.text):
                if component.startswith(("torchtune.", "torchtune_packing.", "torch.")):
                    _get_component_from_path(component)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def block_with(page: str, language: str, text: str) -> Block:
    """The one block of a page that holds a text."""
    [block] = [b for b in ALL if (b.page, b.language) == (page, language) and text in b.text]
    return block


def questions(path: Path) -> Path:
    """A JSONL file of the reader's own, with the columns of the docs."""
    rows = [{"question": f"What is {i} and 1?", "answer": f"It is {i + 1}."} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tune_run(arguments: list[str]) -> str:
    """What ``tune run`` prints with these arguments; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-m", "torchtune._cli.tune", "run", *arguments],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_for_your_own_data_trains(tmp_path: Path) -> None:
    """README: a JSONL file by overrides alone; only the model is smaller here."""
    [words] = commands(block_with("README.md", "bash", "my.jsonl"))
    file = questions(tmp_path / "my.jsonl")
    base = write_tiny_checkpoint(tmp_path / "base")
    shown = tune_run(
        [word.replace("my.jsonl", str(file)) for word in words[2:]]
        + ["tokenizer._component_=tests.test_configs.ChatBytes", "~tokenizer.path"]
        + ["~model_dir", "model._component_=tests.tiny.tiny_model"]
        + [f"checkpointer.checkpoint_dir={base}", f"output_dir={tmp_path / 'mine'}"]
        + ["dataset.max_seq_len=128", "max_steps_per_epoch=2"]
    )
    assert re.search(r"documents in +40 ", shown) and "step 2/2" in shown
    assert list((tmp_path / "mine").glob("step_*"))


def test_the_command_that_shows_packing_runs(tmp_path: Path, smollm2_dir: Path) -> None:
    [words] = commands(block_with("quickstart.md", "bash", "recipes/pack.py"))
    small = [f"figures_dir={tmp_path}", "predict_time=False", "dataset.source.limit=40"]
    shown = tune_run([*words[2:], *small, f"model_dir={smollm2_dir}"])
    assert re.search(r"documents in +40 ", shown)
    assert (tmp_path / "padded_against_packed.png").is_file()


def test_the_commands_for_stores_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """scale.md: list, verify, remove, and remove what killed builds left."""
    stores = tmp_path / "stores"
    PackedDataset(Sums(ByteTokenizer()), max_seq_len=64, cache_dir=stores, cache_key="sums")
    [store] = [path for path in stores.iterdir() if (path / "meta.json").is_file()]
    said = []
    for words in commands(block_with("scale.md", "bash", "store verify")):
        assert words[:3] == ["python", "-m", "torchtune_packing.store"]
        named = [word.replace("/data/stores/alpaca", f"{stores}/alpaca") for word in words[3:]]
        named = [str(store) if "alpaca" in word else word for word in named]
        named = [str(stores) if word == "/data/stores" else word for word in named]
        assert store_command.main(named) == 0, words
        said.append(capsys.readouterr().out)
    assert len(said) == 4 and store.name in said[0] and store.name in said[1]
    assert not store.exists()


def test_the_padding_free_block_trains_and_leaves_nothing_out(tmp_path: Path) -> None:
    """recipes.md: the block beside the other keys of a run, with fewer tokens."""
    text = block_with("recipes.md", "yaml", "collate_flattened").text
    block = OmegaConf.create(text)
    block.dataset.data_files = str(questions(tmp_path / "my.jsonl"))
    cfg = tiny_config(tmp_path, epochs=1, **{"max_steps_per_epoch": None})
    cfg.tokenizer._component_ = f"{ChatBytes.__module__}.ChatBytes"
    cfg.dataset = block.dataset
    cfg.collate_fn = block.collate_fn
    assert block.max_tokens == 4096
    cfg.max_tokens = 100
    for key in ("batch_size", "max_steps_per_epoch"):
        del cfg[key]
    recipe = FullFinetuneRecipe(cfg)
    recipe.setup()
    documents, plain = [], recipe.train_step

    def train_step(step: object) -> None:
        documents.append(step.counts.documents)
        plain(step)

    recipe.train_step = train_step
    assert recipe.train() == 0
    recipe.cleanup()
    assert sum(documents) == 40


def test_marks_say_what_is_missing() -> None:
    reasons = {block.reason for block in ALL if block.reason}
    assert all(re.search(r"GPU|network|needs|sketch", reason) for reason in reasons), reasons


def test_the_navigation_holds_every_page() -> None:
    text = (REPO / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f": {page.name}\n" in text, f"{page.name} is not in mkdocs.yml"


def test_every_key_of_the_recipes_is_documented() -> None:
    text = (REPO / "docs" / "recipes.md").read_text()
    missing = {key for key in preflight.COMMON_KEYS | preflight.LORA_KEYS if f"`{key}`" not in text}
    assert not missing
    head = (REPO / "recipes" / "pack.py").read_text().split('"""')[1]
    assert all(f"{key}=" in head for key in KEYS)
