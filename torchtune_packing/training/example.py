"""One held-out document, with the answer that the model writes before and after training."""

from __future__ import annotations

from typing import Any

import torch

from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.step import PackedForward
from torchtune_packing.types import IGNORE_INDEX

__all__ = ["ShownExample", "greedy_tokens"]

#: Rows are padded to a multiple of this, so that compiled attention meets few shapes.
_ROUND_TO = 128


@torch.no_grad()
def greedy_tokens(
    forward: PackedForward,
    prompt: list[int],
    *,
    ranks: Ranks,
    stop_tokens: list[int],
    max_new_tokens: int = 48,
) -> list[int]:
    """Continues a prompt greedily through the very path that training uses.

    Without a cache, so that it works for every backend, compiled or sharded; meant for a sentence
    or two.

    Args:
        forward: the model with its attention; left in the mode it was in.
        prompt: token ids.
        ranks: the processes of the run; all of them take the first one's token.
        stop_tokens: ids that end the answer.
        max_new_tokens: most tokens to write.

    Returns:
        The new token ids, without the one that stopped it.
    """
    was_training = forward.model.training
    forward.model.eval()
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        n = len(tokens)
        s = -(-n // _ROUND_TO) * _ROUND_TO
        row = torch.zeros(1, s, dtype=torch.int64)
        row[0, :n] = torch.tensor(tokens)
        logits = forward.logits(
            row,
            torch.cat([torch.arange(n), torch.arange(s - n)]).unsqueeze(0),
            torch.tensor([[n, s - n]], dtype=torch.int32),
            rows=torch.tensor([n - 1]),
            real_lengths=torch.tensor([n]),
        )
        last = logits if isinstance(logits, torch.Tensor) else logits[0]
        token = ranks.from_first(int(last.reshape(-1).argmax()))
        if token in stop_tokens:
            break
        tokens.append(token)
    forward.model.train(was_training)
    return tokens[len(prompt) :]


class ShownExample:
    """Keeps what the model answered to one document of the validation set.

    Args:
        dataset: has a ``store``; None shows nothing.
        tokenizer: decodes.
        index: document to show; None shows nothing.
    """

    def __init__(self, dataset: Any, tokenizer: Any, index: int | None) -> None:
        self.texts: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._prompt: list[int] = []
        if dataset is None or index is None:
            return
        store = dataset.store
        index = index % len(store)
        document = store.document(index)
        tokens, labels = document["tokens"].tolist(), document["labels"].tolist()
        first = next((t for t, label in enumerate(labels) if t and label != IGNORE_INDEX), None)
        if first is None:
            return
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
