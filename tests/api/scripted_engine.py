"""An engine whose every token is scripted: one id a character, answers given by the test.

Ids are code points. 1 begins, 101 opens a user turn, 102 an assistant turn, 103 a tool turn, 115 a system turn;
9 ends a turn and 8 is the newline the template writes after it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenlake.errors import ContextOverflow
from tokenlake.ingest.engine import AssistantTurn, Generation, SamplingParams, ToolCall, TurnDelta

HEADS = {"system": 115, "developer": 115, "user": 101, "assistant": 102, "tool": 103}


def text(*ids: int) -> str:
    return "".join(map(chr, ids))


class ScriptedEngine:
    """Answers with what `answers` holds next, else with `[3, 9]`."""

    name = "scripted"
    logprob_mode = "processed"
    stop_ids = (9,)
    vocab_size = 1_114_112
    pad_id = 0

    def __init__(self, *, max_model_len: int = 100_000) -> None:
        self.max_model_len = max_model_len
        self.weight_version: int | None = 7
        self.running = True
        self.answers: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.hold = False
        """Calls wait until `release` or an abort."""
        self.shown_first = 0
        """Sampled ids that a held call streams before it waits."""
        self.started = asyncio.Event()
        self.aborted: list[str] = []
        self.edit: Callable[[Generation], Generation] | None = None
        self._waiting: dict[str, asyncio.Future[bool]] = {}

    async def start(self) -> None: ...

    async def stop(self) -> None:
        for request_id in list(self._waiting):
            await self.abort(request_id)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        on_delta: Callable[[TurnDelta], None] | None = None,
    ) -> Generation:
        prompt = list(prompt_token_ids)
        if len(prompt) + 1 > self.max_model_len:
            raise ContextOverflow("full", prompt_len=len(prompt), max_model_len=self.max_model_len)
        self.prompts.append(prompt)
        self.params.append(params)
        ids = self.answers.pop(0) if self.answers else [3, 9]
        version = self.weight_version
        finish = "stop" if ids[-1:] == [9] else "length"
        shown = ids[: self.shown_first] if self.hold else ids
        if on_delta is not None:
            self._show(text(*shown), on_delta)
        if self.hold:
            waiter = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            self.started.set()
            try:
                if not await waiter:
                    ids, finish = ids[:1], "abort"
                elif on_delta is not None:
                    self._show(text(*ids), on_delta, after=len(shown))
            finally:
                del self._waiting[request_id]
        generation = Generation(
            token_ids=list(ids),
            logprobs=[-(index + 1) / 8 for index in range(len(ids))],
            finish_reason=finish,
            text=self.decode([token for token in ids if token != 9]),
            weight_version=version,
            weight_version_end=self.weight_version,
            weight_version_spans=None,
        )
        return self.edit(generation) if self.edit else generation

    def _show(self, written: str, on_delta: Callable[[TurnDelta], None], after: int = 0) -> None:
        """Stream each character that is certain: thinking between braces, and what comes before a call or the end."""
        thinking = written.startswith("{")
        for index, char in enumerate(written):
            if char in (text(9), "<"):
                return
            kind = "reasoning" if thinking else "content"
            if thinking and char == "}":
                thinking = False
            elif index >= after and not (thinking and index == 0):
                on_delta(TurnDelta(kind=kind, text=char))

    def release(self) -> None:
        """Let every held call go on; for the loop's thread."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(True)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        waiter = self._waiting.get(request_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(False)

    def render_text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        out = text(1) + (json.dumps(tools) if tools else "")
        for message in messages:
            out += text(HEADS[message["role"]])
            if message.get("reasoning_content"):
                out += "{" + message["reasoning_content"] + "}"
            out += message["content"]
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                written = arguments if isinstance(arguments, str) else json.dumps(arguments)
                out += f"<{call['function']['name']}|{written}>"
            out += text(9, 8)
        return out + (text(102) if add_generation_prompt else "")

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        return self.encode(self.render_text(messages, tools, add_generation_prompt=add_generation_prompt))

    def encode(self, written: str) -> list[int]:
        return [ord(char) for char in written]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return text(*(token for token in ids if not (skip_special and token in self.stop_ids)))

    def parse(self, token_ids: Sequence[int], written: str, *, calls: bool = True) -> AssistantTurn:
        reasoning, found = None, []
        if written.startswith("{") and "}" in written:
            reasoning, _, written = written[1:].partition("}")
        said, *spelled = written.split("<")
        if whole := [call for call in spelled if calls and call.endswith(">")]:
            written = said
            for index, call in enumerate(whole):
                name, _, arguments = call.removesuffix(">").partition("|")
                found.append(ToolCall(id=f"call_{len(self.prompts)}_{index}", name=name, arguments=arguments))
        return AssistantTurn(content=written or None, reasoning=reasoning, tool_calls=found)

    def digests(self) -> dict[str, str]:
        return {"tokenizer": "t", "template": "t", "model": "m"}

    async def set_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        if self.weight_version is not None and version < self.weight_version:
            raise ValueError("older")
        self.weight_version = version
