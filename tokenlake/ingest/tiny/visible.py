"""What of a generation can be shown while it goes on: from sampled ids to text that no later id can take back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.ingest.engine import TurnDelta
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer
from tokenlake.ingest.visible import VisibleTurn

__all__ = ["Visible"]

_BROKEN = "\ufffd"


class Visible:
    """Follows one generation. Held back are bytes that are no whole character yet, and what `VisibleTurn` does."""

    def __init__(self, tokenizer: TinyTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._turn = VisibleTurn(stop)
        self._pending: list[int] = []
        """Ids whose text does not end with a whole character yet."""

    def feed(self, token_id: int) -> list[TurnDelta]:
        """Take the next sampled id, which did not end the generation, and give what became certain."""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending)
        if text.endswith(_BROKEN):
            return []
        self._pending.clear()
        return self._turn.feed(text)
