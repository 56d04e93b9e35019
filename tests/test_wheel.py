"""The built wheel in an environment of its own, outside the repository; ``ls`` and ``cp``."""

import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import REPO
from tests.terminal import on_terminal
from tests.tiny import read_metrics, tiny_config
from torchtune_packing.__main__ import main


def call(command: list[Any], folder: Path, code: int = 0) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An empty folder, and the Python of an environment that holds our wheel.

    The environment sees the dependencies of this one, but not this checkout: an editable install
    hangs on a ``.pth`` file, which counts only in a folder that the interpreter itself owns.
    """
    folder = tmp_path_factory.mktemp("outside")
    call([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"], REPO)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    call([*install, "--no-deps", "--no-index", wheel], folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = folder / "work"
    (work / "tests").mkdir(parents=True)
    (work / "tests" / "__init__.py").touch()
    shutil.copy(REPO / "tests" / "tiny.py", work / "tests")
    return work, python


def test_nothing_is_installed_beside_the_package(outside: tuple[Path, Path]) -> None:
    work, python = outside
    (site,) = (work.parent / "env" / "lib").glob("python*/site-packages")
    names = {path.name for path in site.iterdir()} - {"dependencies.pth"}
    assert {name for name in names if "torchtune_packing" not in name} == set()
    told = call([python, "-c", "import torchtune_packing as t; print(t.__file__)"], work)
    assert told.strip() == str(site / "torchtune_packing" / "__init__.py")


def test_recipe_of_the_wheel_and_a_copied_one_run(outside: tuple[Path, Path]) -> None:
    work, python = outside
    config = tiny_config(work, epochs=1, max_steps_per_epoch=2)
    tune = [python, "-m", "torchtune._cli.tune", "run"]
    for name, recipe in (
        ("a", "torchtune_packing/recipes/full_finetune.py"),
        ("b", "my_recipe.py"),
    ):
        OmegaConf.update(config, "output_dir", str(work / name))
        OmegaConf.save(config, work / f"{name}.yaml")
        if recipe == "my_recipe.py":
            said = call([python, "-m", "torchtune_packing", "cp", "full_finetune", recipe], work)
            assert "tune run my_recipe.py --config" in said
            text = (work / recipe).read_text()
            edited = text.replace('"loss": loss', '"my_loss": 1.0, "loss": loss', 1)
            assert edited != text
            (work / recipe).write_text(edited)
        call([*tune, recipe, "--config", f"{name}.yaml"], work)
    first, second = (read_metrics(work / name) for name in "ab")
    assert [first[s]["loss"] for s in (1, 2)] == [second[s]["loss"] for s in (1, 2)]
    assert second[1]["my_loss"] == 1.0 and "my_loss" not in first[1]


def test_ls_of_a_wheel_names_what_tune_run_and_cp_take(outside: tuple[Path, Path]) -> None:
    work, python = outside
    shown = call([python, "-m", "torchtune_packing", "ls"], work).splitlines()
    assert "torchtune_packing/recipes/full_finetune.py" in shown
    name = "torchtune_packing/configs/smollm2/135M_full.yaml"
    assert name in shown
    call([python, "-m", "torchtune_packing", "cp", name, "listed.yaml"], work)
    assert (work / "listed.yaml").is_file()


def test_config_copied_out_of_the_wheel_names_itself(outside: tuple[Path, Path]) -> None:
    work, python = outside
    said = call([python, "-m", "torchtune_packing", "cp", "llama3_1/8B_full", "my.yaml"], work)
    command = "tune run --nproc_per_node 4 torchtune_packing/recipes/full_finetune.py"
    assert f"run it: {command} --config my.yaml" in said
    assert "PYTHONPATH" not in (work / "my.yaml").read_text()
    ours = OmegaConf.load(REPO / "configs" / "llama3_1" / "8B_full.yaml")
    assert OmegaConf.load(work / "my.yaml") == ours


# --- the two commands in a checkout ----------------------------------------------------------


def test_ls_fits_in_80_columns_and_names_files_that_are_there(tmp_path: Path) -> None:
    shown = on_terminal([sys.executable, "-m", "torchtune_packing", "ls"])
    lines = shown.text.splitlines()  # as written; in rows a terminal has broken what is too long
    assert shown.code == 0 and max(map(len, lines)) <= 80
    *entries, _, hint = [line for line in lines if not line.startswith(" ")]
    wanted = sorted(p for p in (REPO / "recipes").glob("*.py") if p.stem != "__init__")
    wanted += sorted((REPO / "configs").rglob("*.yaml"))
    assert [REPO / entry for entry in entries] == wanted
    # A sentence on each, and each can be copied under the name that is shown.
    for line, after in itertools.pairwise(lines):
        assert line not in entries or after.startswith("    ")
    assert "python -m torchtune_packing cp <name> <file>" in hint
    for entry in entries:
        assert main(["cp", entry, str(tmp_path / f"copy{Path(entry).suffix}"), "--force"]) == 0


@pytest.mark.parametrize("columns", [40, 200])
def test_ls_is_as_wide_as_the_terminal(columns: int) -> None:
    shown = on_terminal([sys.executable, "-m", "torchtune_packing", "ls"], columns=columns)
    sentences = [line for line in shown.text.splitlines() if line.startswith(" ")]
    assert columns / 2 < max(map(len, sentences)) <= columns


def test_ls_into_a_closed_pipe_ends_quietly() -> None:
    """As `ls | head -1`, when head is gone before anything is written."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "torchtune_packing", "ls"]
    done = subprocess.run(command, cwd=REPO, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_copied_recipe_is_run_from_a_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchtune makes a module's name of the path, which cannot begin with `/` or `..`."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for target, said in (
        ("mine.py", "run it: tune run mine.py --config <config>"),
        (str(tmp_path / "work" / "a" / "b.py"), "run it: tune run a/b.py --config <config>"),
        ("../up.py", f"run it in {tmp_path}: tune run up.py --config <config>"),
    ):
        assert main(["cp", "recipes/full_finetune.py", target]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.mark.parametrize("name", ["full_finetune", "full_finetune.py", "recipes/full_finetune.py"])
def test_cp_of_a_recipe(name: str, tmp_path: Path) -> None:
    assert main(["cp", name, str(tmp_path)]) == 0
    copied = (tmp_path / "full_finetune.py").read_text()
    assert copied == (REPO / "recipes" / "full_finetune.py").read_text()


def test_cp_of_a_config_in_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "deep" / "mine.yaml"
    assert main(["cp", "configs/smollm2/135M_full.yaml", str(target)]) == 0
    assert f"--config {target}" in capsys.readouterr().out
    assert "PYTHONPATH=. tune run recipes/full_finetune.py" in target.read_text()


def test_cp_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken.yaml"
    taken.write_text("mine")
    for name, target, words in (
        ("smollm2/7B_full", "a.yaml", "there is no recipe or config 'smollm2/7B_full'"),
        ("smollm2/135M_full", "taken.yaml", "exists; choose another name, or add --force"),
        ("smollm2/135M_full", "a.txt", "ends in .yaml"),
        ("full_finetune", "recipe", "ends in .py"),
    ):
        assert main(["cp", name, str(tmp_path / target)]) == 1
        assert words in capsys.readouterr().err
    assert taken.read_text() == "mine"
    assert main(["cp", "--force", "smollm2/135M_full", str(taken)]) == 0
    assert taken.read_text() != "mine"
