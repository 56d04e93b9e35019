"""What is installed and imported: names, wheel, quiet, and life without torchtune or torchao."""

import ast
import os
import re
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import torchtune_packing
from torchtune_packing.quiet import silence_dependencies

from .conftest import REPO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def python(code, **env):
    """Runs code in a fresh interpreter in the repository; returns its output."""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        cwd=REPO,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_public_names():
    assert torchtune_packing.__all__ == [
        "PackedDataset",
        "block_causal_block_mask",
        "block_causal_mask",
        "collate_flattened",
        "collate_packed",
        "cu_seqlens",
        "document_ids",
        "document_starts",
        "plan_packs",
    ]
    assert all(callable(getattr(torchtune_packing, name)) for name in torchtune_packing.__all__)


def test_names_of_the_config_builders():
    from torchtune_packing import attention, datasets

    assert {"packed_dataset", "python_docstrings_dataset"} <= set(datasets.__all__)
    assert all(callable(getattr(datasets, name)) for name in datasets.__all__)
    assert callable(attention.install_attention)


USE_OF_THE_CORE = """
import sys, warnings
import torch, numpy
import torchtune_packing as tp
ds = tp.PackedDataset(
    [{"tokens": [1, 2, 3], "labels": [1, 2, 3]}, {"tokens": [4, 5], "labels": [4, 5]}],
    max_seq_len=6,
)
batch = tp.collate_packed([ds[0]], mask="bool")
assert batch["mask"].shape == (1, 5, 5)
"""


def test_import_is_silent_and_leaves_torchtune_torchao_and_cuda_alone():
    said = python(
        USE_OF_THE_CORE
        + "loaded = [m for m in sys.modules if m.split('.')[0] in ('torchtune', 'torchao')]\n"
        + "print(loaded, torch.cuda.is_initialized())"
    )
    assert said == "[] False\n"


def test_B61_core_works_without_torchtune_torchao_and_flex_attention():
    python(
        "import sys\nflex = 'torch.nn.attention.flex_attention'\n"
        + "sys.modules.update({'torchao': None, 'torchtune': None, flex: None})\n"
        + USE_OF_THE_CORE
        + "try:\n    tp.block_causal_block_mask(torch.tensor([[5]]), 5)\n"
        + "except ImportError as error:\n    assert 'flex_attention' in str(error)\n"
        + "else:\n    raise AssertionError('no error')\n"
    )


def test_B61_a_torchao_that_does_not_fit_is_named_and_the_core_works(tmp_path):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise AttributeError('moved away')\n")
    said = python(
        USE_OF_THE_CORE
        + "import importlib\n"
        + "for name in ('attention', 'models.smollm2', 'datasets'):\n"
        + "    try:\n        importlib.import_module('torchtune_packing.' + name)\n"
        + "    except ImportError as error:\n        print(error)\n",
        PYTHONPATH=str(tmp_path),
    ).splitlines()
    assert len(said) == 3
    for line in said:
        assert line.startswith("torchtune cannot be imported: moved away (torchtune is 0.6.1")
        assert "torchao is 0." in line and "tested with 0.13.0" in line


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(build, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    assert wheel.name == f"torchtune_packing-{torchtune_packing.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_installs_one_package_and_nothing_beside_it(wheel_names):
    tops = {name.partition("/")[0] for name in wheel_names}
    assert tops == {
        "torchtune_packing",
        f"torchtune_packing-{torchtune_packing.__version__}.dist-info",
    }


def test_wheel_carries_recipes_configs_and_every_module(wheel_names):
    tracked = [
        file.relative_to(REPO).as_posix()
        for folder in ("torchtune_packing", "recipes", "configs")
        for file in (REPO / folder).rglob("*")
        if file.suffix in (".py", ".yaml", ".typed")
    ]
    assert "recipes/full_finetune.py" in tracked and "configs/smollm2/135M_full.yaml" in tracked
    for name in tracked:
        inside = name if name.startswith("torchtune_packing/") else f"torchtune_packing/{name}"
        assert inside in wheel_names
    assert not [n for n in wheel_names if n.endswith((".safetensors", ".gguf", ".npy", ".pyc"))]
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


def project():
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def test_constraints_pin_every_direct_dependency_within_its_range():
    pins = {}
    for line in (REPO / "constraints.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line:
            pin = Requirement(line)
            assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), line
            pins.setdefault(pin.name.lower(), []).append(pin)
    extras = project()["optional-dependencies"]
    # flash-attn needs CUDA to build; torchtune_packing[quickstart] is this package itself.
    wanted = [d for name, listed in extras.items() if name != "flash" for d in listed]
    for text in project()["dependencies"] + wanted:
        requirement = Requirement(text)
        if requirement.name == "torchtune_packing":
            continue
        assert requirement.name.lower() in pins, f"{text} has no pin in constraints.txt"
        for pin in pins[requirement.name.lower()]:
            (exact,) = pin.specifier
            assert Version(exact.version) in requirement.specifier, f"{pin} is outside of {text}"


def test_sources_are_valid_for_the_oldest_python():
    assert project()["requires-python"] == ">=3.10"
    for folder in ("torchtune_packing", "recipes", "benchmarks", "tests"):
        for file in (REPO / folder).rglob("*.py"):
            ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=(3, 10))


def test_make_names_an_unusable_python(tmp_path):
    command = ["make", "install", "PYTHON=false", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Python 3.10 or newer, but 'false' is missing or older" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_quiet_drops_only_what_it_names(recwarn, monkeypatch):
    import warnings

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_dependencies()
        warnings.warn("Mismatch dtype between input and weight: float", stacklevel=1)
        warnings.warn("something of ours", stacklevel=1)
    assert [str(w.message) for w in caught] == ["something of ours"]
    # What a user has set is kept.
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
