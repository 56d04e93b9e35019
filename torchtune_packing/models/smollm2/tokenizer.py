r"""SmolLM2's tokenizer in torchtune's terms: ChatML, message masking, truncation that keeps EOS.

A conversation becomes one run of tokens:

    <|im_start|>system\nYou are ...<|im_end|>\n        not trained
    <|im_start|>user\nWhat is 2 + 2?<|im_end|>\n       not trained (message.masked)
    <|im_start|>assistant\n                            not trained: given when it answers
    Four.<|im_end|>                                    trained

What a model writes itself is its text and the closing ``<|im_end|>``, which is also the end of
sequence. Those are trained in every message that is not masked. The header is given at generation
and never trained, and neither is the line break between two messages.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torchtune.data import Message
from torchtune.data._prompt_templates import _get_prompt_template

#: The system message that SmolLM2-Instruct's chat template adds when a conversation has none.
DEFAULT_SYSTEM_MESSAGE = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_IM_START, _IM_END, _END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


class SmolLM2Tokenizer:
    """Text and conversations to token ids and back, as a torchtune model tokenizer.

    It can be pickled into loader workers. Special tokens that are spelled out in a text are read
    as special tokens, as ``transformers`` does for this model.

    Args:
        path: ``tokenizer.json``, or the folder that holds it.
        max_seq_len: longest conversation in tokens; longer ones are cut. None: no limit.
        prompt_template: torchtune prompt template applied to the messages first, if any.
        truncation_type: ``"right"`` keeps the beginning and puts EOS at the cut, ``"left"`` keeps
            the end.

    Attributes:
        special_tokens: spelling to id of the special tokens.
        eos_id: id of ``<|im_end|>``, which closes every message and ends generation.
        pad_id: the same id, as in the published model; padding is never trained.
        bos_id: None, the model was trained without one.
        stop_tokens: ids that end generation.
        vocab_size: number of ids, special tokens included.

    Raises:
        ValueError: if the file is missing or is not SmolLM2's, or an argument is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_seq_len: int | None = None,
        *,
        prompt_template: Any = None,
        truncation_type: str = "right",
    ) -> None:
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(
                f"tokenizer.max_seq_len is {max_seq_len}; it must be at least 1, or None for no "
                "limit."
            )
        if truncation_type not in ("right", "left"):
            raise ValueError(
                f"tokenizer.truncation_type is {truncation_type!r}; choose 'right' or 'left'."
            )
        self._tokenizer = _load(Path(path))
        self.special_tokens = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        missing = {_IM_START, _IM_END, _END_OF_TEXT} - self.special_tokens.keys()
        if missing:
            raise ValueError(
                f"{path} has no special token {sorted(missing)}, so it is not SmolLM2's tokenizer; "
                "take the tokenizer.json of a SmolLM2-Instruct folder."
            )
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.bos_id = None
        self.eos_id: int = self.special_tokens[_IM_END]
        self.pad_id = self.eos_id
        self.stop_tokens = [self.eos_id, self.special_tokens[_END_OF_TEXT]]
        # The parts that every conversation repeats.
        self._im_start_id = self.special_tokens[_IM_START]
        self._line_break = self.encode("\n", add_bos=False, add_eos=False)
        self._header_cache: dict[str, list[int]] = {}

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Turns text into token ids.

        Args:
            text: the text.
            add_bos: accepted for torchtune's data sets; SmolLM2 has no beginning-of-sequence token.
            add_eos: whether to append EOS.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Turns token ids back into text; bytes that are no UTF-8 become replacement characters."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def tokenize_messages(
        self, messages: Sequence[Message], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Turns a conversation into token ids and a mask.

        A conversation that does not start with a system message gets
        ``DEFAULT_SYSTEM_MESSAGE``, as the published chat template does.

        Cut on the right at ``max_seq_len``, the last kept token becomes EOS. It is trained if the
        token that it replaces was: so exactly when the cut falls into what a trained message says.

        Args:
            messages: the conversation. Roles are written as they are.
            add_end_tokens: True for training. False for generation: an assistant message at the end
                is left open, after any other message the header of the answer is added, and nothing
                is cut.

        Returns:
            Token ids, and for each of them True where it is not trained.

        Raises:
            ValueError: if there is no message, or one that is not text.
        """
        if not messages:
            raise ValueError("A conversation has no message; it needs at least one.")
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not add_end_tokens)
        if messages[0].role != "system":
            messages = [
                Message(role="system", content=DEFAULT_SYSTEM_MESSAGE, masked=True, eot=False),
                *messages,
            ]
        tokens: list[int] = []
        mask: list[bool] = []
        for message in messages:
            if tokens:
                tokens += self._line_break
                mask += [True] * len(self._line_break)
            header = self._header(message.role)
            # The text is encoded apart from its header, as a model that answers sees them.
            body = self.encode(_text(message), add_bos=False, add_eos=True)
            tokens += header
            tokens += body
            mask += [True] * len(header)
            mask += [message.masked] * len(body)
        if not add_end_tokens:
            if messages[-1].role == "assistant":
                return tokens[:-1], mask[:-1]
            prompt = self._line_break + self._header("assistant")
            return tokens + prompt, mask + [True] * len(prompt)
        limit = self.max_seq_len
        if limit is not None and len(tokens) > limit:
            if self.truncation_type == "left":
                return tokens[-limit:], mask[-limit:]
            tokens = tokens[: limit - 1] + [self.eos_id]
            mask = mask[:limit]
        return tokens, mask

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replaces a sample's ``messages`` by ``tokens`` and ``mask``.

        Args:
            sample: holds ``messages``, a list of torchtune messages; other keys are kept.
            inference: whether the tokens are a prompt to answer, see ``tokenize_messages``.
        """
        rest = {key: value for key, value in sample.items() if key != "messages"}
        tokens, mask = self.tokenize_messages(sample["messages"], add_end_tokens=not inference)
        return {**rest, "tokens": tokens, "mask": mask}

    def _header(self, role: str) -> list[int]:
        if role not in self._header_cache:
            name = self.encode(f"{role}\n", add_bos=False, add_eos=False)
            self._header_cache[role] = [self._im_start_id, *name]
        return self._header_cache[role]


def smollm2_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    prompt_template: str | dict[str, tuple[str, str]] | None = None,
    truncation_type: str = "right",
) -> SmolLM2Tokenizer:
    """Builds the tokenizer of SmolLM2-Instruct for a config.

    Args:
        path: the model folder, or its ``tokenizer.json``.
        max_seq_len: longest conversation in tokens; longer ones are cut. None: no limit.
        prompt_template: dotted path of a torchtune prompt template, or a dict that maps roles to
            what is put before and after their text.
        truncation_type: ``"right"`` or ``"left"``, see ``SmolLM2Tokenizer``.

    Raises:
        ValueError: if the file is missing or is not SmolLM2's, or an argument is out of range.
    """
    template = None if prompt_template is None else _get_prompt_template(prompt_template)
    return SmolLM2Tokenizer(
        path, max_seq_len, prompt_template=template, truncation_type=truncation_type
    )


def _load(path: Path) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"The tokenizer file {file} does not exist; "
            "`python -m torchtune_packing.models.smollm2.download` prepares SmolLM2's folder."
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise ValueError(
            f"{file} is not a tokenizer.json that the tokenizers library can read ({error}); "
            "prepare the model folder again."
        ) from error


def _text(message: Message) -> str:
    for item in message.content:
        if item["type"] != "text":
            raise ValueError(
                f"A {message.role} message holds content of type {item['type']!r}; SmolLM2 reads "
                "text only."
            )
    return message.text_content
