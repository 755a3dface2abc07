"""What the engine knows of one running request.

Holds the sampled ids with their log-probabilities and weight versions, and decides after each token whether the
request is done. Only the scheduler thread touches a request after it has been submitted.
"""

from __future__ import annotations

import itertools
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from torch import Generator

from tokenlake.ingest.engine import FinishReason, Generation, SamplingParams, TurnDelta
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer
from tokenlake.ingest.tiny.visible import Visible

__all__ = ["Request"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One generation in progress."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    """Sampled tokens at most: `max_tokens` and what the context leaves, whichever is less."""
    generator: Generator
    loop: AbstractEventLoop
    future: Future[Generation]
    on_delta: Callable[[TurnDelta], None] | None = None
    """Gets, on the loop, what becomes certain of the turn."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int | None] = field(default_factory=list["int | None"])
    """Version of the weights that sampled each token."""
    finish_reason: FinishReason | None = None
    _text: str | None = None
    _stop_sequence: str | None = None
    _visible: Visible | None = None

    def append(self, token_id: int, logprob: float, version: int | None, tokenizer: TinyTokenizer) -> None:
        """Take one sampled token and set `finish_reason` if it is the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in tokenizer.stop_ids or self._stopped(tokenizer):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
        elif self.on_delta is not None:
            self._show(token_id, tokenizer, self.on_delta)

    def _stopped(self, tokenizer: TinyTokenizer) -> bool:
        """Whether there is a stop string; cuts the text before the earliest."""
        if not self.params.stop:
            return False
        text = tokenizer.decode(self.token_ids)
        places = [(place, stop) for stop in self.params.stop if (place := text.find(stop)) >= 0]
        if places:
            place, self._stop_sequence = min(places)
            self._text = text[:place]
        return bool(places)

    def _show(self, token_id: int, tokenizer: TinyTokenizer, on_delta: Callable[[TurnDelta], None]) -> None:
        self._visible = self._visible or Visible(tokenizer, self.params.stop)
        for delta in self._visible.feed(token_id):
            self._tell(partial(on_delta, delta))

    def result(self, tokenizer: TinyTokenizer) -> Generation:
        """The generation so far; one that was ended from outside has finish reason `abort`."""
        ids = self.token_ids
        if self._text is None:
            said = ids[:-1] if ids and ids[-1] in tokenizer.stop_ids else ids
            self._text = tokenizer.decode(said)
        return Generation(
            token_ids=ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason or "abort",
            text=self._text,
            weight_version=self.versions[0] if ids else None,
            weight_version_end=self.versions[-1] if ids else None,
            weight_version_spans=self._spans(),
            stop_sequence=self._stop_sequence,
        )

    def resolve(self, generation: Generation) -> None:
        """Hand the generation to whoever waits, from any thread."""
        self._tell(lambda: self.future.set_result(generation))

    def reject(self, error: Exception) -> None:
        """Hand an error to whoever waits, from any thread."""
        self._tell(lambda: self.future.set_exception(error))

    def _tell(self, say: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(lambda: None if self.future.done() else say())

    def _spans(self) -> list[tuple[int, int, int]] | None:
        spans: list[tuple[int, int, int]] = []
        start = 0
        for version, run in itertools.groupby(self.versions):
            if version is None:
                return None
            end = start + sum(1 for _ in run)
            spans.append((version, start, end))
            start = end
        return spans
