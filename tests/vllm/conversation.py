"""Random conversations with the embedded model, the same for the same seed: an agent that echoes what it was told."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from tests.api.conftest import Door
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL, FOLLOW_UPS, SIDE_TASK, SYSTEM_PROMPTS, calculator

Message = dict[str, Any]


@dataclass
class Conversation:
    """One rollout, played; asks as its seed says, whole or streamed."""

    door: Door
    rollout: dict[str, Any]
    seed: int
    stream: bool
    last: str = ""
    """The id of the last answer."""
    seen: dict[str, int] = field(default_factory=dict[str, int])
    """How often what happened."""

    def play(self) -> None:
        chance = random.Random(self.seed)
        tools = [CALCULATOR_TOOL] if chance.random() < 0.7 else None
        question = f"What is {chance.randint(1, 99)} {chance.choice('+-*')} {chance.randint(1, 99)}?"
        messages: list[Message] = [
            {"role": "system", "content": chance.choice(SYSTEM_PROMPTS)},
            {"role": "user", "content": question},
        ]
        forks: list[list[Message]] = []
        for _ in range(chance.randint(2, 6)):
            if forks and chance.random() < 0.25:
                messages = [*chance.choice(forks), {"role": "user", "content": SIDE_TASK}]
            said, finish = self._ask(messages, tools, chance)
            if said.get("reasoning"):
                self._count("thinking")
                if not said["content"] and "tool_calls" not in said:
                    self._count("only thinking")
                if chance.random() < 0.5:
                    self._count("thinking left out")
                    del said["reasoning"]
            messages = [*messages, said]
            results = [
                {"role": "tool", "content": _calculated(call), "tool_call_id": call["id"]}
                for call in said.get("tool_calls", ())
            ]
            self._count("tool call" if results else finish)
            messages += results
            forks.append(messages)
            if not results:
                messages = [*messages, {"role": "user", "content": chance.choice(FOLLOW_UPS)}]

    def _ask(self, messages: list[Message], tools: Any, chance: random.Random) -> tuple[Message, str]:
        body: dict[str, Any] = {
            "model": "any",
            "messages": messages,
            "max_tokens": chance.choice([1, 3, 9, 48, 48, 48]),
            "temperature": chance.choice([0, 1.0, 1.3, 1.7]),
            "top_p": chance.choice([1.0, 1.0, 0.9]),
            "seed": chance.randrange(2**31),
            **({"tools": tools} if tools else {}),
            **({"stop": [chance.choice("0123456789einst")]} if not tools and chance.random() < 0.6 else {}),
            **({"stream": True} if self.stream else {}),
        }
        path = f"/ng-rollout/{self.rollout['rollout_id']}/v1/chat/completions"
        answer = self.door.post(path, body, token=self.rollout["data_capability"])
        assert answer.is_success, answer.text
        self.last, message, finish = streamed(answer.text) if self.stream else _whole(answer.json())
        return message, finish

    def _count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1


def streamed(text: str) -> tuple[str, Message, str]:
    """Id, message and finish reason of a streamed chat completion, as a client puts them together."""
    content, reasoning, finish, name, calls = "", "", "", "", dict[int, Any]()
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        name = chunk["id"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            finish = choice["finish_reason"] or finish
            for piece in delta.get("tool_calls") or ():
                known = calls.setdefault(
                    piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
                )
                known["id"] = piece.get("id") or known.get("id")
                for part in ("name", "arguments"):
                    known["function"][part] += piece["function"].get(part) or ""
    return name, _message(content, reasoning, list(calls.values())), finish


def _whole(body: dict[str, Any]) -> tuple[str, Message, str]:
    (choice,) = body["choices"]
    said = choice["message"]
    message = _message(said["content"], said.get("reasoning"), said.get("tool_calls"))
    return body["id"], message, choice["finish_reason"]


def _message(content: str | None, reasoning: str | None, calls: list[Any] | None) -> Message:
    return {
        "role": "assistant",
        "content": content or None,
        **({"reasoning": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _calculated(call: dict[str, Any]) -> str:
    try:
        return calculator(json.loads(call["function"]["arguments"])["expression"])
    except (KeyError, TypeError, ValueError):
        return "error: give an expression"
