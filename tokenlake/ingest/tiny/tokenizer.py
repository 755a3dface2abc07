"""A byte-level BPE tokenizer whose digits are single tokens.

Byte-level, so that any text survives encode and decode; single digits, because a small model copies numbers one digit
at a time. Special tokens written in a text become their ids, as the serving engines do for rendered prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["END_OF_TEXT", "END_OF_TURN", "TinyTokenizer", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
_SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


class TinyTokenizer:
    """Ids from text and back; immutable and safe to share between threads."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self._tokenizer = Tokenizer.from_buffer(data)
        self.digest = hashlib.sha256(data).hexdigest()
        """SHA-256 hex of the tokenizer file."""
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.pad_id = self.id_of(END_OF_TEXT)
        self.stop_ids = (self.id_of(END_OF_TURN), self.id_of(END_OF_TEXT))

    def id_of(self, token: str) -> int:
        """The id of a token; KeyError when the vocabulary lacks it."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added around it.

        Raises:
            ValueError: a lone surrogate, which has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text has no UTF-8 form: {error.reason} at character {error.start}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of these ids; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves out turn and text ends."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Learn merges from texts and write the tokenizer file; the vocabulary includes the special tokens.

    The markers of thinking and tool calls are single tokens too, but not special: they are part of what a turn says.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (*_SPECIAL, *_MARKERS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in _SPECIAL
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
