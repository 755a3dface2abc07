"""What of a generation can be shown while it goes on: the text that no later token can take back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.ingest.engine import TurnDelta
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer
from tokenlake.ingest.toolcalls import certain, without_begun

__all__ = ["Visible"]

_BROKEN = "\ufffd"


class Visible:
    """Follows one generation. Held back are bytes that are no whole character yet, what may be the beginning of a stop
    string, and what may still become a tool call or be stripped.
    """

    def __init__(self, tokenizer: TinyTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._pending: list[int] = []
        """Ids whose text does not end with a whole character yet."""
        self._text = ""
        self._shown = {"reasoning": 0, "content": 0}
        """Characters of each kind that were given out."""

    def feed(self, token_id: int) -> list[TurnDelta]:
        """Take the next sampled id, which did not end the generation, and give what became certain."""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending)
        if text.endswith(_BROKEN):
            return []
        self._pending.clear()
        self._text += text
        reasoning, content = certain(without_begun(self._text, self._stop))
        deltas: list[TurnDelta] = []
        if len(reasoning) > self._shown["reasoning"]:
            deltas.append(TurnDelta(kind="reasoning", text=reasoning[self._shown["reasoning"] :]))
        if len(content) > self._shown["content"]:
            deltas.append(TurnDelta(kind="content", text=content[self._shown["content"] :]))
        for delta in deltas:
            self._shown[delta.kind] += len(delta.text)
        return deltas
