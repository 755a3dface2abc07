"""Every outcome of the question which call a request continues."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tokenlake.api.dialects.chat_reader import ChatReader
from tokenlake.api.dialects.content import TurnMaker
from tokenlake.ingest.calls import Call, Node
from tokenlake.ingest.fingerprint import History, trace
from tokenlake.ingest.resolve import AttemptLineage, since

READER = ChatReader(TurnMaker())
SYSTEM = {"role": "system", "content": "s"}
TOOL = {"type": "function", "function": {"name": "search"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


class Agent:
    """Commits calls as the gate does."""

    def __init__(self) -> None:
        self.lineage = AttemptLineage()

    def history(self, messages: list[dict[str, Any]], tools: Any = None) -> History:
        return trace(READER.conversation(messages, tools))

    def ask(self, *messages: dict[str, Any], tools: Any = None) -> tuple[str, str | None]:
        found = self.lineage.resolve(self.history(list(messages), tools))
        return found.outcome, found.cause or (found.parent and found.parent.call_id)

    def call(
        self, call_id: str, messages: list[dict[str, Any]], answer: dict[str, Any], tokens: str, tools: Any = None
    ) -> Node:
        history = self.history(messages, tools)
        found = self.lineage.resolve(history)
        parent = found.parent
        after = history.answered(READER.turn(answer))
        node = Node(
            call_id=call_id,
            parent_call_id=parent and parent.call_id,
            before=parent,
            root_call_id=parent.root_call_id if parent else call_id,
            depth=parent.depth + 1 if parent else 0,
            cum_len=len(tokens),
            chain_hash=hashlib.sha256((parent.chain_hash if parent else b"") + tokens.encode()).digest(),
            fingerprint=after.fingerprint,
            context=after.context,
            preamble=after.preamble,
            turns=after.turns,
            reasoning=since(after, parent),
            place=None,
        )
        self.lineage.commit(Call(node=node), seed=history.fingerprint if found.cause == "seeded" else None)
        return node


def test_a_conversation_starts_as_a_root_and_continues_exactly() -> None:
    agent = Agent()
    assert agent.ask(SYSTEM, user("1")) == ("root", "no_history")
    agent.call("c0", [SYSTEM, user("1")], said("a"), "t0")
    agent.call("c1", [SYSTEM, user("1"), said("a"), user("2")], said("b"), "t1")
    assert agent.ask(SYSTEM, user("1"), said("a"), user("2"), said("b"), user("3")) == ("match", "c1")
    assert agent.ask(SYSTEM, user("1"), said("a"), user("other")) == ("match", "c0")
    assert agent.ask(user("fresh")) == ("root", "no_history")


def test_seeded_history_counts_only_calls_that_were_answered() -> None:
    agent = Agent()
    seed = [user("q"), said("example"), user("1")]
    agent.lineage.failed(answered=False)
    assert agent.ask(*seed) == ("root", "seeded")
    agent.call("c0", seed, said("a"), "t0")
    assert agent.ask(*seed) == ("root", "seeded"), "the same request again is still how the conversation starts"
    assert agent.ask(*seed, said("a"), user("2")) == ("match", "c0")
    assert agent.ask(user("q"), said("another example"), user("1")) == ("root", "no_match")
    poisoned = Agent()
    poisoned.lineage.failed(answered=True)
    assert poisoned.ask(*seed) == ("root", "no_match")


def test_what_changed_before_the_answer_is_named() -> None:
    agent = Agent()
    agent.call("c0", [SYSTEM, user("1")], said("a"), "t0", tools=[TOOL])
    last = [said("a"), user("2")]
    other = {"type": "function", "function": {"name": "submit"}}
    assert agent.ask(SYSTEM, user("1"), *last, tools=[TOOL]) == ("match", "c0")
    assert agent.ask(SYSTEM, user("1"), *last, tools=[TOOL, other]) == ("root", "preamble_changed")
    assert agent.ask({"role": "system", "content": "t"}, user("1"), *last, tools=[TOOL]) == ("root", "preamble_changed")
    assert agent.ask(SYSTEM, user("x"), *last, tools=[TOOL]) == ("root", "history_edited")
    assert agent.ask(SYSTEM, user("1"), said("edited"), user("2"), tools=[TOOL]) == ("root", "no_match")


def test_twins_collapse_and_siblings_that_differ_only_in_tokens_need_the_marker() -> None:
    agent = Agent()
    agent.call("c0", [user("1")], said("a"), "same")
    agent.call("c1", [user("1")], said("a"), "same")
    assert agent.ask(user("1"), said("a"), user("2")) == ("match", "c0")
    assert agent.ask(user("1"), said("a", ng_call_id="c1"), user("2")) == ("marker", "c0")
    agent.call("c2", [user("1")], said("a"), "other tokens, same text")
    assert agent.ask(user("1"), said("a"), user("2")) == ("root", "ambiguous")
    assert agent.ask(user("1"), said("a", ng_call_id="c2"), user("2")) == ("marker", "c2")
    assert agent.ask(user("1"), said("a", ng_call_id="unknown"), user("2")) == ("root", "ambiguous")
    assert agent.ask(user("1"), said("b", ng_call_id="c2"), user("2")) == ("root", "no_match")
    assert agent.ask(user("x"), said("a", ng_call_id="c2"), user("2")) == ("root", "history_edited")


@pytest.mark.parametrize(
    ("echo", "outcome"),
    [
        (said("a", reasoning="r"), ("match", "c0")),
        (said("a", reasoning_content="r", tool_calls=[]), ("match", "c0")),
        (said("a", tool_calls=None), ("match", "c0")),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}, ("match", "c0")),
        (said("<think>r</think>a"), ("root", "no_match")),
        (said("b", reasoning="r"), ("root", "no_match")),
        (said("a", reasoning="changed"), ("root", "no_match")),
    ],
)
def test_reasoning_may_be_dropped_but_not_changed(echo: dict[str, Any], outcome: tuple[str, str]) -> None:
    agent = Agent()
    agent.call("c0", [user("1")], said("a", reasoning="r"), "t0")
    assert agent.ask(user("1"), echo, user("2")) == outcome


def test_reasoning_may_be_dropped_from_old_turns_alone_and_tells_siblings_apart() -> None:
    agent = Agent()
    agent.call("c0", [user("1")], said("a", reasoning="r"), "t0")
    agent.call("c1", [user("1"), said("a", reasoning="r"), user("2")], said("b", reasoning="q"), "t1")
    agent.call("c2", [user("1"), said("a", reasoning="r"), user("2")], said("b", reasoning="p"), "t2")
    assert agent.ask(user("1"), said("a"), user("2"), said("b", reasoning="q"), user("3")) == ("match", "c1")
    assert agent.ask(user("1"), said("a"), user("2"), said("b", reasoning="p"), user("3")) == ("match", "c2")
    assert agent.ask(user("1"), said("a"), user("2"), said("b"), user("3")) == ("root", "ambiguous")
    assert agent.ask(user("1"), said("a", reasoning="x"), user("2"), said("b", reasoning="p"), user("3")) == (
        "root",
        "no_match",
    )


def overflow(agent: Agent, call_id: str, parent: Node | None, messages: list[dict[str, Any]]) -> None:
    after = agent.history(messages).answered(READER.turn(said("")))
    agent.lineage.overflow(
        call_id,
        parent,
        fingerprint=after.fingerprint,
        context=after.context,
        preamble=after.preamble,
        reasoning=since(after, parent),
    )


def test_an_overflowed_turn_may_be_echoed_and_stands_for_its_parent() -> None:
    agent = Agent()
    node = agent.call("c0", [user("1")], said("a"), "t0")
    overflow(agent, "c1", node, [user("1"), said("a"), user("long")])
    echo = [user("1"), said("a"), user("long"), said(""), user("2")]
    assert agent.ask(*echo) == ("match", "c0")
    agent.call("c2", echo, said("b"), "t2")
    assert agent.ask(*echo, said("b"), user("3")) == ("match", "c2")
    first = Agent()
    overflow(first, "c0", None, [user("long")])
    assert first.ask(user("long"), said(None), user("2")) == ("root", "no_history")


def test_attempts_share_nothing() -> None:
    first, second = Agent(), Agent()
    first.call("c0", [user("1")], said("a"), "t0")
    assert second.ask(user("1"), said("a"), user("2")) == ("root", "seeded")
