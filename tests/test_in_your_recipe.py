"""docs/in_your_recipe.md: its blocks run, and what they train on equals single documents."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from omegaconf import OmegaConf

from tests.conftest import REPO

PAGE = (REPO / "docs" / "in_your_recipe.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all Python blocks leave behind, run in order in an empty folder."""
    patch = pytest.MonkeyPatch()
    patch.chdir(tmp_path_factory.mktemp("page"))
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, names)
    patch.undo()
    return names


def alone(page: dict[str, Any], indices: list[int], logits_of: Any) -> float:
    """Summed loss of the documents of some packs, each document on its own."""
    total = 0.0
    for pack in (page["packs"][i] for i in indices):
        parts = pack["seq_lens"].tolist()
        for tokens, labels in zip(
            pack["tokens"].split(parts), pack["labels"].split(parts), strict=True
        ):
            logits = logits_of(tokens[None])[0, :-1]
            total += F.cross_entropy(logits, labels[1:], reduction="sum").item()
    return total


def test_every_loop_has_the_loss_of_single_documents(page: dict[str, Any]) -> None:
    packs = [page["packs"][i] for i in (0, 1)]
    assert len(packs[0]["seq_lens"]) > 1
    with torch.no_grad():
        expected = alone(page, [0, 1], page["model"])
        assert page["sum_loss"](page["collate"](packs)).item() == pytest.approx(expected, rel=1e-5)
        inputs, labels = page["collate_aligned"](packs)
        assert labels.shape == (2, 64)
        assert page["aligned_loss"](inputs, labels).item() == pytest.approx(expected, rel=1e-5)

        hf = page["hf_model"].eval()
        batch = page["collate_for_trainer"](packs)
        trained = int((batch["labels"] != -100).sum())
        expected = alone(page, [0, 1], lambda tokens: hf(tokens).logits)
        assert hf(**batch).loss.item() * trained == pytest.approx(expected, rel=1e-4)
        # With boundaries, both packs as one row. (No kernel here reads the boundaries themselves.)
        batch = page["collate_for_flash_attention"](packs)
        assert batch["input_ids"].shape[0] == 1
        assert hf(**batch).loss.item() * trained == pytest.approx(expected, rel=1e-4)
        longest = max(len(pack["tokens"]) for pack in packs)
        lengths = []
        for pack in packs:
            lengths += pack["seq_lens"].tolist()
            lengths += [longest - len(pack["tokens"])] * (len(pack["tokens"]) < longest)
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == ends
        assert batch["max_length_q"] == batch["max_length_k"] == max(lengths)
    assert page["trainer"].state.global_step == 2


def test_the_yaml_is_that_of_the_stock_config() -> None:
    """tests/test_stock_recipes.py runs that config; the command names it too."""
    (text,) = blocks("yaml")
    path = "configs/stock/smollm2_full_single_device.yaml"
    config = OmegaConf.to_container(OmegaConf.load(REPO / path))
    for key, value in yaml.safe_load(text).items():
        assert config[key] == value
    (command,) = blocks("bash")
    assert command.strip() == f"tune run full_finetune_single_device --config {path}"
