"""Where an answer ends and what follows it begins: the ids that vLLM was given, by its own log.

What the embedded model says to each question is so greedily, or by the first seed that gives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tests.vllm.conftest import Served
from tests.vllm.test_worker import AGAIN, say
from tokenlake.api.demo.vllm_policy import read_log
from tokenlake.ingest.tiny.engine import WEIGHTS_DIR
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL, SYSTEM_PROMPT
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer

TOKENIZER = TinyTokenizer(WEIGHTS_DIR / "tokenizer.json")
END, THINK = TOKENIZER.id_of("<|im_end|>"), TOKENIZER.id_of("<think>")
PROBLEM = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "What is 1 + 1?"}]
PLAIN = [{"role": "user", "content": "Name the operation in one word."}]
SILENT = [{"role": "system", "content": "\n"}, {"role": "user", "content": "\n"}]
"""Greedily the model says nothing to this."""


@dataclass
class Turn:
    """An answer: what is asked for it, what it shows, and how it ends."""

    messages: list[Any]
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    thinks: bool = False
    shows: bool = True
    ended: bool = True
    """On the stop id."""
    follows: str = f"user\n{AGAIN['content']}"
    """The message after it, as both templates write it."""


ENDS = {
    "stop-id": Turn(PLAIN),
    "tool-call": Turn(PROBLEM, {"tools": [CALCULATOR_TOOL]}, follows="tool\n43"),
    "length": Turn(PLAIN, {"max_tokens": 1}, ended=False),
    "stop-text": Turn(PLAIN, {"stop": ["i"]}, ended=False),
    "nothing": Turn(SILENT, shows=False),
    "thinking-alone": Turn(PROBLEM, {"temperature": 1, "stop": ["</think>"]}, thinks=True, shows=False, ended=False),
    "thinking-cut-off": Turn(PROBLEM, {"temperature": 1, "max_tokens": 4}, thinks=True, shows=False, ended=False),
    "thinking-and-answer": Turn(PROBLEM, {"temperature": 1}, thinks=True),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_follows_an_answer_is_rendered_and_nothing_is_there_twice(
    door: Door, worker: Served, group: str, end: str
) -> None:
    """B09, B11: the end-of-turn is the one that was sampled, or is carried with mask 0; old thinking stays as ids."""
    _follows(door, worker, group, ENDS[end], "\n<|im_start|>{}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("end", [name for name in ENDS if name != "nothing"])
def test_a_stop_id_that_opens_the_next_message_is_there_once(
    open_gate: Opener, other: Served, group: str, end: str
) -> None:
    """B09, B11: by a template that closes no answer, and leaves out one that shows nothing."""
    with open_gate(engine=backend(other.url, "worker")) as door:
        _follows(door, other, group, ENDS[end], "{}<|im_start|>assistant\n")


def _follows(door: Door, served: Served, group: str, turn: Turn, written: str) -> None:
    first, second = _calls(door, _played(door, group, turn))
    whole = first["token_ids"]
    assert (whole[-1] == END) == turn.ended
    assert whole.count(THINK) == turn.thinks
    rendered = TOKENIZER.encode(written.format(turn.follows))
    carried = rendered if turn.ended else [END, *rendered]
    assert _given(door, served, second["call_id"]) == [*whole, *carried], "the engine's own prompt"
    assert second["mode"] == "token_in"
    assert second["token_ids"][: len(carried)] == carried
    assert not any(second["token_mask"][: len(carried)])
    assert second["logprobs"][: len(carried)] == [0.0] * len(carried)
    if turn.messages is SILENT:
        assert [token for token, mask in zip(whole, first["token_mask"], strict=True) if mask] == [END]


def _played(door: Door, group: str, turn: Turn) -> dict[str, Any]:
    """A rollout of two calls: that answer, and one after it. The agent does not send old thinking back."""
    asked = {"tools": openai.NOT_GIVEN, **turn.more}
    for seed in range(100):
        (rollout,) = door.register(f"{group}s{seed}")
        messages = [*turn.messages]
        answer = say(door, rollout, messages, seed=seed, **asked).choices[0].message
        thought = getattr(answer, "reasoning", None)
        if (bool(thought), bool(answer.content or answer.tool_calls)) == (turn.thinks, turn.shows):
            messages[len(turn.messages)].pop("reasoning", None)
            messages[len(turn.messages)].setdefault("content", "")
            say(door, rollout, messages, tools=asked["tools"], max_tokens=2)
            return rollout
    raise AssertionError("the model never answers like that")


def _calls(door: Door, rollout: dict[str, Any]) -> list[dict[str, Any]]:
    query = "SELECT call_id, mode, token_ids, token_mask, logprobs FROM deltas WHERE rollout_id = ? ORDER BY call_id"
    return door.service.lake.sql(query, [rollout["rollout_id"]]).to_arrow_table().to_pylist()


def _given(door: Door, served: Served, call: str) -> list[int]:
    """The prompt of a call, as vLLM logs what its engine is given."""
    wait_for(door, lambda: call in read_log("".join(served.log)))
    return read_log("".join(served.log))[call].prompt_token_ids
