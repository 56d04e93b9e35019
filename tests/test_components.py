"""Names of components: what is found, and what a refusal says about the rest."""

from pathlib import Path

import pytest
import torch

from torchtune_packing.components import find_component


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("torch.optim.AdamW", torch.optim.AdamW),
        ("torch.nn.functional.cross_entropy", torch.nn.functional.cross_entropy),  # a submodule
        ("pathlib.Path.cwd", Path.cwd),  # a method of a class
    ],
)
def test_what_a_path_names_is_found(path: str, expected: object) -> None:
    assert find_component(path, "optimizer._component_") == expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "torchtune.models.llama3_2.llama3_2_1B",
            "`model._component_` is torchtune.models.llama3_2.llama3_2_1B, but "
            "torchtune.models.llama3_2 has no llama3_2_1B; did you mean "
            "torchtune.models.llama3_2.llama3_2_1b?",
        ),
        (
            "torch.optim.Bananas",
            "`model._component_` is torch.optim.Bananas, but torch.optim has no Bananas; correct "
            "the name.",
        ),
        (
            "torch.optim.AdamW.stepp",
            "`model._component_` is torch.optim.AdamW.stepp, but torch.optim.AdamW has no stepp; "
            "did you mean torch.optim.AdamW.step?",
        ),
        (
            "no_such_package.x",
            "`model._component_` is no_such_package.x, but no package no_such_package is installed "
            "here; install it, or correct the name.",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_is_close(path: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_component(path, "model._component_")
    assert str(caught.value) == message


def test_package_that_a_component_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").write_text("import no_such_package\n")
    (tmp_path / "my_broken.py").write_text("raise ValueError('first line\\nsecond line')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="my_model.build, which needs the package no_such_package"):
        find_component("my_model.build", "model._component_")
    with pytest.raises(ValueError, match="my_broken.build, which cannot be imported: first line$"):
        find_component("my_broken.build", "model._component_")
