"""Greedy answers from a torchtune model, to show what a finetuning changed."""

from collections.abc import Sequence
from typing import Any

import torch
from torchtune.data import Message
from torchtune.modules import TransformerDecoder
from torchtune.modules.common_utils import local_kv_cache


@torch.no_grad()
def greedy_answer(
    model: TransformerDecoder,
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    device: torch.device | str,
    max_new_tokens: int = 128,
) -> str:
    """Answers a conversation with the likeliest token at each step.

    The key-value caches exist during the call only, no random number is drawn, and the model's
    training mode is restored, so training goes on as if it had not been asked.

    Args:
        model: torchtune decoder.
        tokenizer: torchtune model tokenizer.
        messages: the conversation to answer.
        device: where the model lies.
        max_new_tokens: the answer is cut off after this many tokens.

    Returns:
        The answer's text, without special tokens.

    Raises:
        ValueError: if prompt and answer do not fit into the model's positions.
    """
    device = torch.device(device)
    # An empty answer at the end asks every torchtune tokenizer for the header of an answer.
    asked = [*messages, Message(role="assistant", content="")]
    prompt: list[int] = tokenizer({"messages": asked}, inference=True)["tokens"]
    length = len(prompt) + max_new_tokens
    if length > model.max_seq_len:
        raise ValueError(
            f"The prompt has {len(prompt)} tokens; with {max_new_tokens} new ones it passes the "
            f"model's {model.max_seq_len} positions; shorten the prompt or lower max_new_tokens."
        )
    stop_tokens = set(tokenizer.stop_tokens)
    answer: list[int] = []
    was_training = model.training
    model.eval()
    try:
        cache = local_kv_cache(
            model,
            batch_size=1,
            device=device,
            dtype=next(model.parameters()).dtype,
            decoder_max_seq_len=length,
        )
        with cache:
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
            positions = torch.arange(length, device=device)[None]
            new, start = prompt, 0
            while len(answer) < max_new_tokens:
                end = start + len(new)
                logits = model(
                    torch.tensor([new], device=device),
                    input_pos=positions[:, start:end],
                    mask=mask[:, start:end],
                )
                token = int(logits[0, -1].argmax())
                if token in stop_tokens:
                    break
                answer.append(token)
                new, start = [token], end
    finally:
        model.train(was_training)
    text: str = tokenizer.decode(answer)
    return text.strip()
