"""Which call a request continues: exact, or nothing.

`AttemptLineage` is what is known of the calls of one attempt: digests, lengths and places, a few hundred bytes a call
and no token. It is never evicted while its rollout is open, and a restarted gate rebuilds it from lineage events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenlake.ingest.calls import Call, Calls, Node, Reasoning
from tokenlake.ingest.fingerprint import History

__all__ = ["CAUSES", "UNRESOLVED", "AttemptLineage", "Cause", "Resolution", "since"]

Cause = Literal[
    "no_history",
    "seeded",
    "no_match",
    "preamble_changed",
    "history_edited",
    "ambiguous",
    "splice_failed",
    "prefix_unavailable",
]
CAUSES: tuple[Cause, ...] = (
    "no_history",
    "seeded",
    "no_match",
    "preamble_changed",
    "history_edited",
    "ambiguous",
    "splice_failed",
    "prefix_unavailable",
)
"""Why a call is a root. The first two are how a conversation starts; the others lost their parent."""
UNRESOLVED: tuple[Cause, ...] = CAUSES[2:]
"""The causes that `on_unresolved` decides about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What a request continues."""

    outcome: Literal["root", "match", "marker"]
    cause: Cause | None
    """Of a root; None of a match."""
    parent: Node | None


@dataclass(frozen=True, slots=True)
class _Overflowed:
    """An empty answer that may be echoed, and the call whose sequence it stands for (None: for nothing sampled)."""

    node: Node | None
    fingerprint: bytes
    context: bytes
    preamble: bytes
    reasoning: Reasoning


_NONE: frozenset[bytes] = frozenset()
_Echo = Node | _Overflowed
"""An answer that may be echoed."""


class AttemptLineage:
    """The calls of one attempt, by what their answers say. Not thread-safe: the gate's event loop owns it."""

    __slots__ = ("_answered_failures", "_overflowed", "_seeds", "calls")

    def __init__(self) -> None:
        self.calls = Calls()
        self._overflowed: dict[str, _Overflowed] | None = None
        self._seeds: frozenset[bytes] = _NONE
        self._answered_failures = 0

    def commit(self, call: Call, *, seed: bytes | None = None) -> None:
        """A call became durable and committed. `seed`: the request's fingerprint, of a root that started seeded."""
        self.calls.add(call)
        if seed is not None:
            self._seeds |= {seed}

    def overflow(
        self,
        call_id: str,
        parent: Node | None,
        *,
        fingerprint: bytes,
        context: bytes,
        preamble: bytes,
        reasoning: Reasoning,
    ) -> None:
        """An overflowed call was answered with an empty turn; the digests cover that turn."""
        echo = _Overflowed(parent, fingerprint, context, preamble, reasoning)
        self._overflowed = {**(self._overflowed or {}), call_id: echo}

    def failed(self, *, answered: bool) -> None:
        """A call failed. Only an answered one may come back as history that nobody captured."""
        self._answered_failures += answered

    def resolve(self, history: History) -> Resolution:
        """The parent of a request, or why it is a root."""
        if history.model_turns == 0:
            return _root("no_history")
        overflowed = self._overflowed or {}
        echoes: list[_Echo] = [*self.calls.saying(history.fingerprint)]
        echoes += [echo for echo in overflowed.values() if echo.fingerprint == history.fingerprint]
        if not echoes:
            return _root(self._unknown(history))
        if history.marker is not None:
            marked = next((echo for echo in echoes if _is(echo, history.marker)), overflowed.get(history.marker))
            if marked is not None and marked.fingerprint == history.fingerprint and self._agrees(marked, history):
                return _found("marker", marked.node and _first_twin(marked.node, echoes))
        agreeing = [echo for echo in echoes if self._agrees(echo, history)]
        if not agreeing:
            return _root(_difference(echoes, history))
        candidates = [echo.node for echo in agreeing]
        nodes = _distinct(node for node in candidates if node is not None)
        if len(nodes) > 1 or (nodes and None in candidates):
            return _root("ambiguous")
        return _found("match", nodes[0] if nodes else None)

    def _unknown(self, history: History) -> Cause:
        first = not self.calls and not self._overflowed and not self._answered_failures
        return "seeded" if first or history.fingerprint in self._seeds else "no_match"

    def _agrees(self, echo: _Echo, history: History) -> bool:
        return echo.context == history.boundary_context and self._reasoning_agrees(echo, history.reasoning)

    def _reasoning_agrees(self, echo: _Echo, claimed: Reasoning) -> bool:
        """Reasoning may be dropped turn by turn, but not changed and not invented."""
        if not claimed:
            return True
        served = dict(echo.reasoning)
        if echo.node is not None:
            served.update(self.calls.reasoning(echo.node.call_id))
        return all(served.get(turn) == digest for turn, digest in claimed)


def since(history: History, parent: Node | None) -> Reasoning:
    """The reasoning of a history's turns after the parent's answer."""
    start = 0 if parent is None else parent.turns
    return tuple(item for item in history.reasoning if item[0] >= start)


def _root(cause: Cause) -> Resolution:
    return Resolution(outcome="root", cause=cause, parent=None)


def _found(outcome: Literal["match", "marker"], node: Node | None) -> Resolution:
    """An overflowed first call stands for no sampled token: what follows it starts anew."""
    return _root("no_history") if node is None else Resolution(outcome=outcome, cause=None, parent=node)


def _is(echo: _Echo, call_id: str) -> bool:
    return isinstance(echo, Node) and echo.call_id == call_id


def _first_twin(node: Node, echoes: Iterable[_Echo]) -> Node:
    """The first committed call with the tokens of `node` among the answers that say the same."""
    return next((each for each in echoes if isinstance(each, Node) and each.chain_hash == node.chain_hash), node)


def _difference(echoes: Sequence[_Echo], history: History) -> Cause:
    """Same visible model-written turns, but something else is not as it was."""
    if any(echo.context == history.boundary_context for echo in echoes):
        return "no_match"
    return "history_edited" if any(echo.preamble == history.preamble for echo in echoes) else "preamble_changed"


def _distinct(nodes: Iterable[Node]) -> list[Node]:
    """Candidates with different tokens: twins collapse to the first committed, ancestors give way to descendants."""
    unique: dict[bytes, Node] = {}
    for node in nodes:
        unique.setdefault(node.chain_hash, node)
    if len(unique) < 2:
        return list(unique.values())
    ancestors = {ancestor.chain_hash for node in unique.values() for ancestor in node.chain()[:-1]}
    return [node for node in unique.values() if node.chain_hash not in ancestors]
