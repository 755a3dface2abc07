"""Agents that speak one dialect each, through its official SDK, over one neutral history.

A history is a list of `Told` (system, user, tool) and `Said` (what the model answered). A speaker echoes its own
answers as its SDK hands them back, and writes those of another dialect as a converter would.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anthropic
import openai

from tests.api.conftest import Door

Tool = dict[str, Any]


@dataclass
class Told:
    role: str
    text: str
    answers: str = ""


@dataclass
class Called:
    id: str
    name: str
    arguments: str


@dataclass
class Said:
    dialect: str
    native: Any
    response_id: str
    text: str
    reasoning: str | None
    finish: str
    usage: tuple[int, int]
    calls: list[Called] = field(default_factory=list)

    @property
    def call_id(self) -> str:
        return self.response_id.rpartition("_")[2].rpartition("-")[2]


class Speaker:
    name = ""
    path = ""
    finishes: ClassVar[dict[str, str]] = {}

    def __init__(self, door: Door, rollout: dict[str, Any], **more: Any) -> None:
        self.door = door
        self.rollout = rollout
        self.more = {"max_retries": 0, **more}

    def say(self, history: list[Any], *, stream: bool = False, tools: list[Tool] | None = None, **more: Any) -> Said:
        body = {**self.body(history, tools or []), **more}
        return self.read(self.streamed(body) if stream else self.whole(body))

    def raw(self, history: list[Any], *, tools: list[Tool] | None = None, headers: Any = None, **more: Any) -> Any:
        """The same call without the SDK."""
        return self.post({**self.body(history, tools or []), **more}, **(headers or {}))

    def post(self, body: Any, **headers: str) -> Any:
        path = f"/ng-rollout/{self.rollout['rollout_id']}{self.path}"
        return self.door.post(path, body, token=self.rollout["data_capability"], **headers)

    def body(self, history: list[Any], tools: list[Tool]) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def streamed(self, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def read(self, answer: Any) -> Said:
        raise NotImplementedError

    def first_text(self, event: Any) -> str | None:
        """The text of a raw stream event, if it carries some."""
        raise NotImplementedError

    def events(self, history: list[Any], **more: Any) -> Any:
        """The SDK's raw events of a streamed call."""
        raise NotImplementedError


class ChatSpeaker(Speaker):
    name, path = "chat", "/v1/chat/completions"
    finishes: ClassVar = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}

    @property
    def client(self) -> openai.OpenAI:
        return self.door.agent(self.rollout, **self.more)

    def body(self, history: list[Any], tools: list[Tool]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "messages": [self.message(item) for item in history]}
        if tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        return body

    def message(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Told):
            linked = {"tool_call_id": item.answers} if item.answers else {}
            return {"role": item.role, "content": item.text, **linked}
        if item.dialect == self.name:
            return item.native.choices[0].message.model_dump(exclude_none=True)
        message: dict[str, Any] = {"role": "assistant", "content": item.text or None}
        if item.reasoning:
            message["reasoning_content"] = item.reasoning
        if item.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in item.calls
            ]
        return message

    def whole(self, body: dict[str, Any]) -> Any:
        return self.client.chat.completions.create(**body)

    def streamed(self, body: dict[str, Any]) -> Any:
        options = {"include_usage": True}
        with self.client.chat.completions.stream(**body, stream_options=options) as stream:
            for _ in stream:  # the helper's own end refuses an answer that stopped for length
                pass
            return stream.current_completion_snapshot

    def events(self, history: list[Any], **more: Any) -> Any:
        return self.client.chat.completions.create(**self.body(history, []), stream=True, **more)

    def first_text(self, event: Any) -> str | None:
        return event.choices[0].delta.content if event.choices else None

    def read(self, answer: Any) -> Said:
        choice = answer.choices[0]
        calls = [Called(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        return Said(
            dialect=self.name,
            native=answer,
            response_id=answer.id,
            text=choice.message.content or "",
            reasoning=getattr(choice.message, "reasoning", None),
            finish=choice.finish_reason,
            usage=(answer.usage.prompt_tokens, answer.usage.completion_tokens),
            calls=calls,
        )


class ResponsesSpeaker(Speaker):
    name, path = "responses", "/v1/responses"
    finishes: ClassVar = {"stop": "completed", "length": "incomplete", "tool_calls": "completed"}

    @property
    def client(self) -> openai.OpenAI:
        return self.door.agent(self.rollout, **self.more)

    def body(self, history: list[Any], tools: list[Tool]) -> dict[str, Any]:
        items: list[Any] = []
        body: dict[str, Any] = {"model": "m", "input": items}
        for item in history:
            if isinstance(item, Told) and item.role == "system" and not items:
                body["instructions"] = item.text
            else:
                items += self.items(item)
        if tools:
            body["tools"] = [{"type": "function", "strict": True, **tool} for tool in tools]
        return body

    def items(self, item: Any) -> list[dict[str, Any]]:
        if isinstance(item, Told):
            if item.answers:
                return [{"type": "function_call_output", "call_id": item.answers, "output": item.text}]
            return [{"role": item.role, "content": item.text}]
        if item.dialect == self.name:
            return [output.model_dump(exclude_none=True) for output in item.native.output]
        items: list[dict[str, Any]] = []
        if item.reasoning:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": item.reasoning}]})
        if item.text or not item.calls:
            items.append({"role": "assistant", "content": [{"type": "output_text", "text": item.text}]})
        return items + [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in item.calls
        ]

    def whole(self, body: dict[str, Any]) -> Any:
        return self.client.responses.create(**body)

    def streamed(self, body: dict[str, Any]) -> Any:
        last = None
        with self.client.responses.stream(**body) as stream:
            for event in stream:
                last = event
        assert last is not None
        assert last.type in ("response.completed", "response.incomplete")
        return last.response

    def events(self, history: list[Any], **more: Any) -> Any:
        return self.client.responses.create(**self.body(history, []), stream=True, **more)

    def first_text(self, event: Any) -> str | None:
        return event.delta if event.type == "response.output_text.delta" else None

    def read(self, answer: Any) -> Said:
        thoughts = [part.text for item in answer.output if item.type == "reasoning" for part in item.content]
        calls = [Called(i.call_id, i.name, i.arguments) for i in answer.output if i.type == "function_call"]
        return Said(
            dialect=self.name,
            native=answer,
            response_id=answer.id,
            text=answer.output_text,
            reasoning="".join(thoughts) or None,
            finish=answer.status,
            usage=(answer.usage.input_tokens, answer.usage.output_tokens),
            calls=calls,
        )


class AnthropicSpeaker(Speaker):
    name, path = "anthropic", "/v1/messages"
    finishes: ClassVar = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    @property
    def client(self) -> anthropic.Anthropic:
        url, key = self.rollout["base_url"].removesuffix("/v1"), self.rollout["data_capability"]
        return self.door.agents.enter_context(anthropic.Anthropic(base_url=url, api_key=key, **self.more))

    def body(self, history: list[Any], tools: list[Tool]) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        body: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": messages}
        for item in history:
            if isinstance(item, Told) and item.role == "system":
                body["system"] = [{"type": "text", "text": item.text, "cache_control": {"type": "ephemeral"}}]
                continue
            role, blocks = self.blocks(item)
            if (
                role == "user"
                and messages
                and messages[-1]["role"] == "user"
                and isinstance(item, Told)
                and (item.answers or messages[-1]["content"][-1]["type"] == "tool_result")
            ):
                messages[-1]["content"] += blocks
            else:
                messages.append({"role": role, "content": blocks})
        if tools:
            body["tools"] = [
                {**{k: v for k, v in tool.items() if k != "parameters"}, "input_schema": tool["parameters"]}
                for tool in tools
            ]
        return body

    def blocks(self, item: Any) -> tuple[str, list[dict[str, Any]]]:
        if isinstance(item, Told):
            if item.answers:
                return "user", [{"type": "tool_result", "tool_use_id": item.answers, "content": item.text}]
            return "user", [{"type": "text", "text": item.text}]
        if item.dialect == self.name:
            return "assistant", [block.model_dump(exclude_none=True) for block in item.native.content]
        blocks: list[dict[str, Any]] = []
        if item.reasoning:
            blocks.append({"type": "thinking", "thinking": item.reasoning, "signature": "x"})
        if item.text:
            blocks.append({"type": "text", "text": item.text})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in item.calls
        ]
        return "assistant", blocks

    def whole(self, body: dict[str, Any]) -> Any:
        return self.client.messages.create(**body)

    def streamed(self, body: dict[str, Any]) -> Any:
        with self.client.messages.stream(**body) as stream:
            return stream.get_final_message()

    def events(self, history: list[Any], **more: Any) -> Any:
        return self.client.messages.create(**self.body(history, []), stream=True, **more)

    def first_text(self, event: Any) -> str | None:
        return event.delta.text if event.type == "content_block_delta" and event.delta.type == "text_delta" else None

    def read(self, answer: Any) -> Said:
        kinds = {"text": "", "thinking": ""}
        calls: list[Called] = []
        for block in answer.content:
            if block.type == "tool_use":
                calls.append(Called(block.id, block.name, json.dumps(block.input)))
            else:
                kinds[block.type] += getattr(block, block.type)
        return Said(
            dialect=self.name,
            native=answer,
            response_id=answer.id,
            text=kinds["text"],
            reasoning=kinds["thinking"] or None,
            finish=answer.stop_reason,
            usage=(answer.usage.input_tokens, answer.usage.output_tokens),
            calls=calls,
        )


SPEAKERS: list[type[Speaker]] = [ChatSpeaker, ResponsesSpeaker, AnthropicSpeaker]
