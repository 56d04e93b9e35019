"""Every shell and Python block of the README and the docs: run, or checked, or marked.

A block that needs a GPU, the network or a program of its own carries a line above its fence:

    <!-- not run: needs Spark -->

Python blocks of one page run in order in one namespace, in an empty folder. Shell blocks are not
run: their recipes, configs, overrides, modules and make targets must exist, as that goes stale.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from recipes.pack import KEYS
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
        if block.page != page or not is_shell(block) or block.reason:
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
