"""Truncation that leaves the labels of whole samples alone.

Several of torchtune 0.6.1's tokenizers, once they have a ``max_seq_len``, mask the last token of
every sample, also of those that are not cut: Qwen2.5 then never learns to end its answer. Here the
tokenizer works without its limit, and what is too long is cut afterwards:

    whole        [h i t h e r e E]   trained [- - t h e r e E]
    limit 8      [h i t h e r e E]           [- - t h e r e E]     nothing is cut, nothing changes
    limit 5      [h i t h E]                 [- - t h E]           the end is trained like its turn
"""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["ExactTruncation", "with_exact_truncation"]


def with_exact_truncation(tokenizer: Any) -> Any:
    """Wraps a torchtune tokenizer that has a ``max_seq_len``; returns any other as it is."""
    of_torchtune = type(tokenizer).__module__.startswith("torchtune.")
    if not of_torchtune or getattr(tokenizer, "max_seq_len", None) is None:
        return tokenizer
    return ExactTruncation(tokenizer)


class ExactTruncation:
    """Stands in for a tokenizer: the same attributes and tokens, with truncation done last.

    Args:
        tokenizer: a torchtune model tokenizer with a ``max_seq_len``; it is not changed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.max_seq_len: int = tokenizer.max_seq_len
        self._whole = copy.copy(tokenizer)
        self._whole.max_seq_len = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":  # absent while a copy is unpickled
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __call__(self, sample: Any, inference: bool = False) -> Any:
        """Tokenizes ``sample["messages"]`` into ``tokens`` and ``mask`` (True = not trained)."""
        result = self._whole(sample, inference=inference)
        result["tokens"], result["mask"] = self._cut(
            result["tokens"], result["mask"], end=not inference
        )
        return result

    def tokenize_messages(self, messages: Any, **keywords: Any) -> tuple[list[int], list[bool]]:
        """Tokens and mask of a list of messages; keywords as the tokenizer takes them."""
        tokens, mask = self._whole.tokenize_messages(messages, **keywords)
        return self._cut(tokens, mask, end=all(keywords.values()))

    def _cut(
        self, tokens: list[int], mask: list[bool], *, end: bool
    ) -> tuple[list[int], list[bool]]:
        if len(tokens) <= self.max_seq_len:
            return tokens, mask
        tokens, mask = tokens[: self.max_seq_len], mask[: self.max_seq_len]
        if end:  # as torchtune does; its mask stays that of the turn that was cut
            tokens[-1] = self._whole.eos_id
        return tokens, mask
