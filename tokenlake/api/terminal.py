"""The terminal call of an attempt: the one whose answer was scored, by evidence and never by time.

Witnesses in order: a declared call, the response id of the scored answer, its content. They may only confirm each
other; witnesses that disagree, or evidence that fits two different token sequences, attribute nothing. Without a
witness it is the only leaf. Abandoned retries (childless, while a call with the same parent and prompt was continued)
and answers that no client waited for are no leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenlake.api.rollouts import Attempt
from tokenlake.ingest.calls import Call
from tokenlake.ingest.fingerprint import text_digest

__all__ = ["Terminal", "find_terminal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """What the evidence says."""

    call_id: str | None
    selection: str | None
    """`declared`, `response_id`, `content` or `only_leaf`; None when nothing was attributed."""
    reason: str | None
    """Why nothing was attributed: `terminal_unknown`, `terminal_ambiguous` or `no_calls`."""
    overflowed: str | None = None
    """The overflowed call that was the scored answer; `call_id` is its parent, for which it stands."""

    @property
    def named(self) -> str | None:
        """The call that lineage names."""
        return self.overflowed or self.call_id


def find_terminal(
    attempt: Attempt, *, call_id: str | None = None, response_id: str | None = None, scored_text: str | None = None
) -> Terminal:
    """Select the terminal of an attempt whose calls are all in."""
    if not attempt.calls:
        return _nothing("no_calls")
    witnesses: list[tuple[str, set[str]]] = []
    overflowed: str | None = None
    if call_id is not None:
        found, overflowed = _named(attempt, [call_id])
        witnesses.append(("declared", found))
    if response_id is not None:
        found, empty = _by_response(attempt, response_id)
        overflowed = overflowed or empty
        witnesses.append(("response_id", found))
    if any(not found for _, found in witnesses):
        return _nothing("terminal_unknown")
    if scored_text is not None and (found := _by_content(attempt, scored_text)):
        witnesses.append(("content", found))
    if witnesses:
        agreed = set[str].intersection(*(found for _, found in witnesses))
        selection = witnesses[0][0]
    else:
        agreed = set(_leaves(attempt))
        selection = "only_leaf"
        overflowed = next((name for name, o in attempt.overflows.items() if o.parent_call_id in agreed), None)
    if selection == "content":
        agreed = agreed & set(_leaves(attempt)) or agreed
    one = _collapse(attempt.calls[name] for name in attempt.calls if name in agreed)
    if one is None:
        return _nothing("terminal_ambiguous")
    return Terminal(call_id=one, selection=selection, reason=None, overflowed=overflowed)


def _nothing(reason: str) -> Terminal:
    return Terminal(call_id=None, selection=None, reason=reason)


def _named(attempt: Attempt, names: Iterable[str]) -> tuple[set[str], str | None]:
    """The committed calls that these call ids stand for, and one of them that overflowed."""
    found: set[str] = set()
    overflowed: str | None = None
    for name in names:
        overflow = attempt.overflows.get(name)
        if overflow is not None:
            overflowed = name
        target = name if overflow is None else overflow.parent_call_id
        if target is not None and target in attempt.calls:
            found.add(target)
    return found, overflowed


def _by_response(attempt: Attempt, response_id: str) -> tuple[set[str], str | None]:
    names = [name for name, call in attempt.calls.items() if call.response_id == response_id]
    names += [name for name, overflow in attempt.overflows.items() if overflow.response_id == response_id]
    return _named(attempt, names)


def _by_content(attempt: Attempt, text: str) -> set[str]:
    digest = text_digest(text)
    return {name for name, call in attempt.calls.items() if call.text_digest == digest}


def _leaves(attempt: Attempt) -> list[str]:
    calls = dict(attempt.calls)
    called = {call.node.parent_call_id for call in calls.values()}
    seen = {name: call for name, call in calls.items() if name in called or name not in attempt.undelivered}
    parents = {call.node.parent_call_id for call in seen.values()}
    continued = {_request(calls[name]) for name in parents if name in calls}
    return [
        name
        for name, call in seen.items()
        if name not in parents and (call.prompt_digest is None or _request(call) not in continued)
    ]


def _request(call: Call) -> tuple[str | None, bytes | None]:
    return call.node.parent_call_id, call.prompt_digest


def _collapse(calls: Iterable[Call]) -> str | None:
    """The first of calls that are all the same token sequence; None when they are not, or there is none."""
    candidates = list(calls)
    if len({call.node.chain_hash for call in candidates}) != 1:
        return None
    return candidates[0].node.call_id
