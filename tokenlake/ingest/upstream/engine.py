"""An unmodified OpenAI-compatible server as an `Engine`: it renders, samples and tokenizes; the gate captures.

Rendering blocks and is called from threads; sampling is asynchronous. Both run on the loop that started the engine, so
that one pool of connections serves both and every call is cancelled at its deadline. Nothing of the upstream is ours to
change: its weights are loaded, and named, by whoever trains them, and their version is what the upstream says it
sampled with, or unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenlake.errors import ContextOverflow, EngineFailed
from tokenlake.ingest.engine import AssistantTurn, Generation, LogprobMode, Message, SamplingParams, Tool, TurnDelta
from tokenlake.ingest.toolcalls import parse_turn
from tokenlake.ingest.upstream.client import UpstreamClient, UpstreamRefused
from tokenlake.ingest.upstream.facts import UpstreamFacts
from tokenlake.ingest.upstream.hop import Hop
from tokenlake.ingest.upstream.sampled import PATHS, read_generation, sampling_body
from tokenlake.ingest.upstream.streamed import Assembly
from tokenlake.ingest.upstream.template import UpstreamTemplate
from tokenlake.ingest.visible import VisibleTurn

if TYPE_CHECKING:
    import torch

__all__ = ["UpstreamEngine"]

_Started = tuple[UpstreamClient, asyncio.AbstractEventLoop, int]
"""A client, the loop that it belongs to, and the thread of that loop."""
_ABORTED = Generation(
    token_ids=[],
    logprobs=[],
    finish_reason="abort",
    text="",
    weight_version=None,
    weight_version_end=None,
    weight_version_spans=None,
)


class UpstreamEngine:
    """One model of one upstream; `facts` come from `probe`. Any number of requests run at once."""

    def __init__(
        self,
        url: str,
        facts: UpstreamFacts,
        *,
        key: str | None = None,
        deadline_s: float = 30.0,
        hop: Hop | None = None,
    ) -> None:
        self.url = url
        self.facts = facts
        self._key = key
        self._deadline_s = deadline_s
        self._hop = hop
        self._template = UpstreamTemplate(facts.name, self._ask)
        self._stop_ids = facts.stop_ids
        self._weight_version: int | None = None
        self._open: _Started | None = None
        self._running: dict[str, asyncio.Task[Generation]] = {}

    @property
    def name(self) -> str:
        """The served model's name."""
        return self.facts.name

    @property
    def logprob_mode(self) -> LogprobMode:
        """As the upstream was started with; checked by the probe."""
        return self.facts.logprob_mode

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Those that the probe proved, and those that have ended an answer since."""
        return self._stop_ids

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.facts.max_model_len

    @property
    def vocab_size(self) -> int | None:
        """Told by a capture worker; no route of an unmodified server tells it."""
        return self.facts.vocab_size

    @property
    def pad_id(self) -> int:
        """The tokenizer's pad token where it is told, else a stop id."""
        return self.facts.pad_id

    @property
    def weight_version(self) -> int | None:
        """What sampled the newest token of the last answer; None when the upstream does not say."""
        return self._weight_version

    @property
    def running(self) -> bool:
        """Whether the client is open; an upstream that fails is a named error of each call."""
        return self._open is not None

    async def start(self) -> None:
        """Open the client on this loop; idempotent."""
        if self._open is None:
            client = UpstreamClient(self.url, key=self._key, deadline_s=self._deadline_s, hop=self._hop)
            self._open = (client, asyncio.get_running_loop(), threading.get_ident())

    async def stop(self) -> None:
        """Abort what runs and close every connection; idempotent."""
        for task in list(self._running.values()):
            task.cancel()
        closing, self._open = self._open, None
        if closing is not None:
            await closing[0].close()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        on_delta: Callable[[TurnDelta], None] | None = None,
    ) -> Generation:
        """Sample one continuation of these ids; cancelling closes the connection, which aborts it upstream.

        How long it may take is the caller's to bound.

        Raises:
            ContextOverflow: the prompt leaves no room for one token; nothing was sent.
            ValueError: no prompt, a `request_id` in use, or a parameter that the upstream refuses.
            EngineFailed: the upstream failed; `detail["reason"]` names how.
        """
        prompt = [int(token) for token in prompt_token_ids]
        room = self.max_model_len - len(prompt)
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is running already")
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the model holds {self.max_model_len} with the answer: "
                "shorten the conversation",
                prompt_len=len(prompt),
                max_model_len=self.max_model_len,
            )
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        task = self._running[request_id] = asyncio.ensure_future(self._sample(prompt, params, limit, on_delta))
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            return _ABORTED
        finally:
            del self._running[request_id]

    async def _sample(
        self, prompt: list[int], params: SamplingParams, limit: int, on_delta: Callable[[TurnDelta], None] | None
    ) -> Generation:
        route = self.facts.route
        body = sampling_body(route, self.name, prompt, params, limit)
        try:
            if on_delta is None:
                answer = await self._started()[0].post(PATHS[route], body, bounded=False)
            else:
                answer = await self._stream(PATHS[route], body, VisibleTurn(params.stop), on_delta)
        except UpstreamRefused as error:
            if error.field in ("input_tokens", "input_text"):
                raise ContextOverflow("the upstream says that the prompt leaves no room for an answer") from error
            # Its own words may hold a token id, which no error of ours does.
            named = f"parameter {error.field}" if error.field else error.kind
            raise ValueError(f"the upstream refuses this call: {named}") from error
        generation, ended_by = read_generation(route, answer, prompt)
        if ended_by is not None and not params.stop and ended_by not in self._stop_ids:
            self._stop_ids = (*self._stop_ids, ended_by)
        if generation.weight_version_end is not None:
            self._weight_version = generation.weight_version_end
        return generation

    async def _stream(
        self, path: str, body: dict[str, Any], turn: VisibleTurn, on_delta: Callable[[TurnDelta], None]
    ) -> dict[str, Any]:
        assembly = Assembly()
        opened = self._as_written("")
        if opened:
            turn.feed(opened)
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with contextlib.aclosing(self._started()[0].events(path, whole)) as events:
            async for event in events:
                for delta in turn.feed(assembly.feed(event)):
                    on_delta(delta)
        return assembly.answer()

    def _as_written(self, text: str) -> str:
        """A sampled text with the think block that the template has opened before it."""
        return "<think>" + text if self.facts.opens_thinking else text

    async def abort(self, request_id: str) -> None:
        """Close a request's connection; it ends with finish reason `abort` and nothing sampled. Unknown is no error."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """Ids of the upstream's chat template; from a thread other than the loop's.

        Raises:
            ValueError: the template cannot express this.
            EngineFailed, Deadline: the upstream failed, or did not answer in time.
        """
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool
    ) -> str:
        """As `render`, before tokenization."""
        return self._template.render_text(messages, tools, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, by the upstream's tokenizer; from a thread other than the loop's."""
        return self._template.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of these ids; `skip_special` leaves out stop ids. From a thread other than the loop's."""
        return self._template.decode([token for token in ids if not (skip_special and token in self._stop_ids)])

    def parse(self, token_ids: Sequence[int], text: str, *, calls: bool = True) -> AssistantTurn:  # noqa: ARG002 - the contract offers both
        """The turn in Hermes' and Qwen's form, with the think block that the template may have opened."""
        return parse_turn(self._as_written(text), calls=calls)

    def digests(self) -> dict[str, str]:
        """Of the tokenizer where the upstream tells it, and of what its template makes of one fixed conversation."""
        found = {"tokenizer": self.facts.tokenizer_digest, "template": self.facts.template_digest}
        return {name: digest for name, digest in found.items() if digest is not None}

    async def set_weights(self, state: Mapping[str, torch.Tensor] | None, version: int) -> None:  # noqa: ARG002
        """Nothing for a version alone: what is loaded is what the upstream says; ValueError for weights."""
        if state is not None:
            raise ValueError("an upstream's weights are loaded by whoever runs it")

    def _started(self) -> _Started:
        if self._open is None:
            raise EngineFailed("the upstream engine is not running", reason="engine_stopped")
        return self._open

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        client, loop, thread = self._started()
        if threading.get_ident() == thread:
            raise RuntimeError("rendering waits for the loop that it was called on: call it from a thread")
        return asyncio.run_coroutine_threadsafe(client.post(path, body), loop).result()
