"""Fingerprints: what a conversation says, hashed so that equal means equal and nothing else does.

Two digests grow turn by turn, each a SHA-256 over framed fields (tag, length, bytes; never joined strings):

- the **fingerprint** covers the turns the model wrote;
- the **context digest** covers tools and every turn, whoever wrote it.

Both leave reasoning out, because clients may drop it; each turn's reasoning is digested beside them, so that a client
that keeps it must keep it unchanged. Tool-call arguments compare as JSON values: key order, spacing and escapes do not
count, no text is the empty object, `true` is not `1`, `"1"` is not `1`, and numbers are equal when their values are
(`2` and `2.0`: what a client that decodes and encodes them turns into each other). Text that is not JSON compares as it
is. Tool-call ids are linkage: a tool result is hashed with the position of the call it answers, which also says the
name of its tool. One request is hashed once, in time linear in its length.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from tokenlake.errors import InvalidInput
from tokenlake.ingest.messages import Conversation, Turn

__all__ = ["History", "canonical_arguments", "json_digest", "reasoning_digest", "text_digest", "trace"]

_MAX_NESTING = 100
_u64 = struct.Struct("<Q").pack
_START = hashlib.sha256(b"tokenlake.fingerprint.1").digest()
_INSTRUCTIONS = ("system", "developer")
_dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The digests of a conversation, and where its last model-written turn ended."""

    preamble: bytes
    """Tools and leading system text."""
    fingerprint: bytes
    """All model-written turns."""
    context: bytes
    """Everything."""
    turns: int
    """How many turns `context` covers."""
    model_turns: int
    boundary_context: bytes
    """`context` at the end of the last model-written turn."""
    boundary_turns: int
    """Turns up to and including the last model-written one; 0 without one."""
    reasoning: tuple[tuple[int, bytes], ...]
    """(turn, digest) for each model-written turn that carries reasoning."""
    marker: str | None
    """`ng_call_id` on the last model-written turn."""
    linkage: Mapping[str, int]
    """Tool-call id to position among all tool calls."""

    def answered(self, turn: Turn) -> History:
        """The history with the assistant turn that was served."""
        linkage = dict(self.linkage)
        digest = _turn_digest(turn, linkage)
        context = _chain(self.context, digest)
        own = () if turn.reasoning is None else ((self.turns, reasoning_digest(turn.reasoning)),)
        return replace(
            self,
            fingerprint=_chain(self.fingerprint, digest),
            context=context,
            turns=self.turns + 1,
            model_turns=self.model_turns + 1,
            boundary_context=context,
            boundary_turns=self.turns + 1,
            reasoning=self.reasoning + own,
            marker=turn.marker,
            linkage=linkage,
        )


def trace(conversation: Conversation) -> History:
    """Digest a whole request."""
    linkage: dict[str, int] = {}
    tools = hashlib.sha256(b"tokenlake.tools.1" + b"".join(map(_canonical, conversation.tools))).digest()
    preamble = context = boundary_context = tools
    fingerprint = _START
    boundary_turns = model_turns = 0
    reasoning: list[tuple[int, bytes]] = []
    marker: str | None = None
    leading = True
    for index, turn in enumerate(conversation.turns):
        digest = _turn_digest(turn, linkage)
        context = _chain(context, digest)
        if turn.role == "assistant":
            leading = False
            fingerprint = _chain(fingerprint, digest)
            boundary_context, boundary_turns, marker = context, index + 1, turn.marker
            model_turns += 1
            if turn.reasoning is not None:
                reasoning.append((index, reasoning_digest(turn.reasoning)))
        elif leading:
            leading = turn.role in _INSTRUCTIONS
            preamble = context if leading else preamble
    return History(
        preamble=preamble,
        fingerprint=fingerprint,
        context=context,
        turns=len(conversation.turns),
        model_turns=model_turns,
        boundary_context=boundary_context,
        boundary_turns=boundary_turns,
        reasoning=tuple(reasoning),
        marker=marker,
        linkage=linkage,
    )


def json_digest(value: object) -> bytes:
    """Digest of a JSON value, independent of key order, spacing and escapes: what makes two requests the same.

    Raises `InvalidInput` for a value that is nested too deeply.
    """
    try:
        text = _dumps(value)
    except RecursionError as error:
        raise InvalidInput("JSON is nested too deeply") from error
    return hashlib.sha256(b"tokenlake.json.1" + text.encode()).digest()


def text_digest(text: str) -> bytes:
    """Digest of a served answer's text, for finding the call whose answer was scored. 32 bytes."""
    return hashlib.sha256(b"tokenlake.text.1" + _utf8(text)).digest()


def reasoning_digest(text: str) -> bytes:
    """Digest of one turn's reasoning, shortened to 8 bytes: it only tells siblings apart that agree in all else."""
    return hashlib.sha256(b"tokenlake.reasoning.1" + _utf8(text)).digest()[:8]


def canonical_arguments(arguments: object) -> bytes:
    """Framed bytes that are equal exactly when two tool calls have the same arguments.

    Text that does not parse as JSON (or nests deeper than 100, or holds NaN or an infinity) stands for itself.
    """
    if not isinstance(arguments, str):
        return _frame(b"j", _canonical(arguments))
    if not arguments.strip():
        return _frame(b"j", _canonical({}))
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
        return _frame(b"j", _canonical(value))
    except (ValueError, RecursionError, InvalidInput):
        return _frame(b"w", _utf8(arguments))


def _turn_digest(turn: Turn, linkage: dict[str, int]) -> bytes:
    fields = [_role(turn.role)]
    for part in turn.parts:
        raw = _utf8(part)
        fields += (b"t", _u64(len(raw)), raw)
    if turn.name is not None and turn.role != "tool":
        fields.append(_frame(b"m", _utf8(turn.name)))
    if turn.tool_call_id is not None:
        position = linkage.get(turn.tool_call_id)
        fields.append(_frame(b"u", _utf8(turn.tool_call_id)) if position is None else _frame(b"l", b"%d" % position))
    for call in turn.tool_calls:
        fields += [_frame(b"n", _utf8(call.name)), canonical_arguments(call.arguments)]
        linkage.setdefault(call.id or f"\0{len(linkage)}", len(linkage))
    return hashlib.sha256(b"".join(fields)).digest()


def _chain(state: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(state + digest).digest()


def _frame(tag: bytes, data: bytes) -> bytes:
    return tag + _u64(len(data)) + data


@lru_cache(maxsize=8)
def _role(role: str) -> bytes:
    return _frame(b"r", role.encode())


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _canonical(value: Any, depth: int = 0) -> bytes:
    if depth > _MAX_NESTING:
        raise InvalidInput("JSON is nested too deeply", limit=_MAX_NESTING)
    if value is None:
        return b"z"
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, str):
        return _frame(b"s", _utf8(value))
    if isinstance(value, int | float):
        return _frame(b"d", _number(value))
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return _frame(b"a", b"".join(_canonical(item, depth + 1) for item in items))
    pairs = sorted((_utf8(key), _canonical(item, depth + 1)) for key, item in cast("dict[str, Any]", value).items())
    return _frame(b"o", b"".join(_frame(b"k", key) + item for key, item in pairs))


def _number(value: float) -> bytes:
    if isinstance(value, int):
        # Hex: Python refuses the decimal text of an integer of more than 4300 digits.
        return b"%x" % value
    if not math.isfinite(value):
        raise InvalidInput("a number of the request is not finite")
    return b"%x" % int(value) if value.is_integer() else repr(value).encode()
