"""One held-out document, with the answer that the model writes before and after training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchtune.modules.common_utils import local_kv_cache

from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.step import PackedForward
from torchtune_packing.types import IGNORE_INDEX

__all__ = ["ShownExample", "greedy_tokens"]

#: Rows are padded to a multiple of this, so that compiled attention meets few shapes.
_ROUND_TO = 128

#: Logits ``[v]`` of the position after some tokens.
_Continue = Callable[[list[int]], torch.Tensor]


@torch.no_grad()
def greedy_tokens(
    forward: PackedForward,
    prompt: Sequence[int],
    *,
    ranks: Ranks,
    stop_tokens: Sequence[int],
    max_new_tokens: int = 48,
) -> list[int]:
    """Continues a prompt with the likeliest token at each step.

    No random number is drawn and nothing is left behind, so training goes on as if the model had
    not been asked.

    Args:
        forward: the model with its attention; left in the mode it was in.
        prompt: token ids.
        ranks: the processes of the run; all of them take the first one's token.
        stop_tokens: ids that end the answer.
        max_new_tokens: most tokens to write; fewer where the model has no more positions.

    Returns:
        The new token ids, without the one that stopped it.
    """
    model: Any = forward.model
    was_training = model.training
    tokens = list(prompt)
    length = min(len(prompt) + max_new_tokens, _positions(model))
    way = _through_caches if _can_cache(model, ranks) else _through_packs
    model.eval()
    try:
        with way(forward, length) as continued:
            while len(tokens) < length:
                token = ranks.from_first(int(continued(tokens).argmax()))
                if token in stop_tokens:
                    break
                tokens.append(token)
    finally:
        model.train(was_training)
    return tokens[len(prompt) :]


def _positions(model: nn.Module) -> int:
    return getattr(model, "max_seq_len", sys.maxsize)


def _can_cache(model: nn.Module, ranks: Ranks) -> bool:
    """Caches are for plain models: neither sharded nor compiled nor with sliding windows."""
    return not ranks.is_distributed and not any(
        module._compiled_call_impl is not None or hasattr(module, "sliding_window_size")
        for module in model.modules()
    )


@contextmanager
def _through_caches(forward: PackedForward, length: int) -> Iterator[_Continue]:
    """Each token is computed once, with torchtune's key-value caches."""
    model: Any = forward.model
    device = forward.attention.device
    dtype = model.tok_embeddings.weight.dtype
    positions = torch.arange(length, device=device)[None]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
    start = 0

    def continued(tokens: list[int]) -> torch.Tensor:
        nonlocal start
        new = torch.tensor([tokens[start:]], device=device)
        seen = slice(start, len(tokens))
        logits = model(new, input_pos=positions[:, seen], mask=mask[:, seen])
        start = len(tokens)
        return _last(logits)

    with local_kv_cache(
        model, batch_size=1, device=device, dtype=dtype, decoder_max_seq_len=length
    ):
        yield continued


@contextmanager
def _through_packs(forward: PackedForward, length: int) -> Iterator[_Continue]:
    """The whole row again for each token, through the very path that training uses."""

    def continued(tokens: list[int]) -> torch.Tensor:
        n = len(tokens)
        s = min(-(-n // _ROUND_TO) * _ROUND_TO, _positions(forward.model))
        row = torch.zeros(1, s, dtype=torch.int64)
        row[0, :n] = torch.tensor(tokens)
        logits = forward.logits(
            row,
            torch.cat([torch.arange(n), torch.arange(s - n)]).unsqueeze(0),
            torch.tensor([[n, s - n]], dtype=torch.int32),
            rows=torch.tensor([n - 1]),
            real_lengths=torch.tensor([n]),
        )
        return _last(logits)

    yield continued


def _last(logits: Any) -> torch.Tensor:
    """Logits ``[v]`` of the last position, whole or in chunks."""
    last: torch.Tensor = logits if isinstance(logits, torch.Tensor) else logits[-1]
    return last.flatten(0, -2)[-1]


class ShownExample:
    """Keeps what the model answered to one document of the validation set.

    Args:
        dataset: has a ``store``; None shows nothing.
        tokenizer: decodes.
        index: document to show, negative from the end; None shows nothing.

    Raises:
        ValueError: there is no such document, or none of it is trained.
    """

    def __init__(self, dataset: Any, tokenizer: Any, index: int | None) -> None:
        self.texts: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._prompt: list[int] = []
        if dataset is None or index is None:
            return
        store = dataset.store
        if not -len(store) <= index < len(store):
            raise ValueError(
                f"`show_example` is {index}, but the validation set has {len(store)} documents; "
                "set it to a number from 0, or to null."
            )
        document = store.document(index)
        tokens, labels = document["tokens"].tolist(), document["labels"].tolist()
        first = next((t for t, label in enumerate(labels) if t and label != IGNORE_INDEX), None)
        if first is None:
            raise ValueError(
                f"`show_example` is {index}, a document of the validation set that has no trained "
                "token after its first, so there is no answer to show; take another, or null."
            )
        self._prompt = tokens[:first]
        self.texts["prompt"] = tokenizer.decode(self._prompt)
        self.texts["written by a person"] = tokenizer.decode(tokens[first:])

    def write(self, name: str, forward: PackedForward, ranks: Ranks) -> None:
        """Lets the model answer and keeps the text under ``name``; all ranks call it."""
        if self._prompt:
            stop_tokens = self._tokenizer.stop_tokens
            answer = greedy_tokens(forward, self._prompt, ranks=ranks, stop_tokens=stop_tokens)
            self.texts[name] = self._tokenizer.decode(answer)

    def lines(self) -> list[str]:
        """The example for people, a heading and an indented text each."""
        shown = []
        for name, text in self.texts.items():
            shown.append(f"--- {name}")
            shown += [f"    {line}" for line in text.strip().splitlines()]
        return shown
