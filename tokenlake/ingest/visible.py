"""What of a turn can be shown while it is sampled: the text that no later text can take back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.ingest.engine import TurnDelta
from tokenlake.ingest.toolcalls import certain, without_begun

__all__ = ["VisibleTurn"]


class VisibleTurn:
    """Follows one turn in whole characters. Held back is what may be the beginning of a stop string, and what may still
    become a tool call or be stripped.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._text = ""
        self._shown = {"reasoning": 0, "content": 0}
        """Characters of each kind that were given out."""

    def feed(self, text: str) -> list[TurnDelta]:
        """Take the next text and give what became certain."""
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
