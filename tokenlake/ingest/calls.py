"""The committed calls of one attempt, packed: numbers and digests side by side, an object only of what is asked for.

A gate holds every call of every open rollout, so a call costs what it says and little more. What does not fit the
packed form, as an import may bring it, is held as an object: what was added is what comes back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenlake.ids import check_call_id
from tokenlake.store.delta import Place

__all__ = ["Call", "Calls", "Node", "Reasoning"]

_ROW = struct.Struct("<32s32s32s32s32s32s13i5HB")
_HASH = 32
_NO_HASH = bytes(_HASH)
_BEFORE, _BEFORE_AT = struct.Struct("<i"), 6 * _HASH
"""The parent's number in a row, and where it is."""
_MAX_NAMES = 4096
_NO_PROMPT, _NO_REQUEST, _NO_VERSION, _NO_VERSION_END = 1, 2, 4, 8
Reasoning = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One committed call, as the next request needs it."""

    call_id: str
    parent_call_id: str | None
    """The call that it continues; None of a root."""
    before: Node | Callable[[], Node] | None = field(compare=False, repr=False)
    """That call, or where to ask for it."""
    root_call_id: str
    depth: int
    cum_len: int
    chain_hash: bytes
    fingerprint: bytes
    """Of the model-written turns up to and including its answer."""
    context: bytes
    """Of everything up to and including its answer."""
    preamble: bytes
    turns: int
    """Turns up to and including its answer."""
    reasoning: Reasoning
    """(turn, digest) of the reasoning in turns after the parent's answer, its own answer's included."""
    place: Place | None
    """Where its delta lies; None when lineage does not say."""

    @property
    def parent(self) -> Node | None:
        """The call that it continues; None of a root."""
        return self.before() if callable(self.before) else self.before

    @property
    def node(self) -> Node:
        """What an echo of its answer stands for."""
        return self

    def chain(self) -> list[Node]:
        """Root to this call."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One committed call."""

    node: Node
    response_id: str | None = None
    prev_len: int = 0
    delta_len: int = 0
    sampled_tokens: int = 0
    mode: str = "text"
    cause: str | None = None
    """Why it is a root; None of a call with a parent."""
    weight_version: int | None = None
    weight_version_end: int | None = None
    digest: bytes = b""
    prompt_digest: bytes | None = None
    text_digest: bytes = b""
    request_digest: bytes | None = None


class _Names:
    """Texts that many calls share, by number: writers, modes, causes, how response ids begin."""

    def __init__(self) -> None:
        self._texts: list[str | None] = [None]
        self._numbers: dict[str | None, int] = {None: 0}

    def number(self, text: str | None) -> int:
        """Of a text; raises `KeyError` when there are too many."""
        if text not in self._numbers and len(self._texts) < _MAX_NAMES:
            self._texts.append(text)
            self._numbers[text] = len(self._texts) - 1
        return self._numbers[text]

    def text(self, number: int) -> str:
        """Of a number that is not 0."""
        return self._texts[number] or ""

    def optional(self, number: int) -> str | None:
        """Of a number; 0 is none."""
        return self._texts[number]


_names = _Names()


class Calls(Mapping[str, Call]):
    """Calls by id, in commit order. One thread adds, any may read."""

    __slots__ = ("_fingerprints", "_ids", "_odd", "_preambles", "_reasoning", "_rows", "_width")

    def __init__(self) -> None:
        self._ids = b"\n"
        self._width: int | None = None
        """Bytes of each id with what ends it; 0 when they differ."""
        self._fingerprints = b""
        self._rows = b""
        self._preambles: tuple[bytes, ...] = ()
        self._reasoning: dict[int, Reasoning] | None = None
        self._odd: dict[int, Call] | None = None
        """What does not fit a row."""

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids.decode().split())

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __contains__(self, call_id: object) -> bool:
        return isinstance(call_id, str) and self._find(call_id) >= 0

    def __getitem__(self, call_id: str) -> Call:
        at = self._find(call_id)
        if at < 0:
            raise KeyError(call_id)
        return self._at(at)

    def saying(self, fingerprint: bytes) -> list[Node]:
        """The calls whose answers end model-written turns with this fingerprint."""
        found: list[Node] = []
        start = self._fingerprints.find(fingerprint)
        while start >= 0:
            if start % _HASH == 0:
                found.append(self._node(start // _HASH))
            start = self._fingerprints.find(fingerprint, start + 1)
        return found

    def reasoning(self, call_id: str) -> dict[int, bytes]:
        """The digest of each reasoning on the way to a call, by turn."""
        found: dict[int, bytes] = {}
        at = self._find(call_id)
        while at >= 0:
            odd = None if self._odd is None else self._odd.get(at)
            if odd is not None:
                found.update(odd.node.reasoning)
                at = -1 if odd.node.parent_call_id is None else self._find(odd.node.parent_call_id)
            else:
                found.update(() if self._reasoning is None else self._reasoning.get(at, ()))
                (at,) = _BEFORE.unpack_from(self._rows, at * _ROW.size + _BEFORE_AT)
        return found

    def behind(self, call_id: str) -> Callable[[], Node]:
        """A call of these, looked up when it is asked for."""
        return lambda: self[call_id].node

    def add(self, call: Call) -> None:
        """Take in a call that was committed after all others. Its parent is one of them."""
        node, at = call.node, len(self)
        raw = check_call_id(node.call_id).encode() + b"\n"
        self._width = len(raw) if self._width in (None, len(raw)) else 0
        if node.preamble not in self._preambles:
            self._preambles += (node.preamble,)
        self._ids += raw
        self._fingerprints += (node.fingerprint + _NO_HASH)[:_HASH]
        row = self._row(call)
        self._rows += row or bytes(_ROW.size)
        if row is None:
            self._odd = self._odd or {}
            self._odd[at] = call
        elif node.reasoning:
            self._reasoning = self._reasoning or {}
            self._reasoning[at] = node.reasoning

    def _row(self, call: Call) -> bytes | None:
        """The packed form of a call, or None where it would come back as another one."""
        node, place, prefix = call.node, call.node.place, call.response_id
        digests = (node.chain_hash, node.context, call.digest, call.text_digest)
        optional = [_NO_HASH if each is None else each for each in (call.prompt_digest, call.request_digest)]
        before = -1 if node.parent_call_id is None else self._find(node.parent_call_id)
        root = self._find(node.root_call_id)
        if prefix is not None:
            if not prefix.endswith(node.call_id):
                return None
            prefix = prefix.removesuffix(node.call_id)
        whole = all(len(each) == _HASH for each in (node.fingerprint, *digests, *optional))
        linked = root >= 0 and (before >= 0) == (node.parent_call_id is not None)
        if not whole or not linked or node.cum_len != call.prev_len + call.delta_len:
            return None
        flags = _NO_PROMPT * (call.prompt_digest is None) | _NO_REQUEST * (call.request_digest is None)
        flags |= _NO_VERSION * (call.weight_version is None) | _NO_VERSION_END * (call.weight_version_end is None)
        where = (
            (0, 0, 0, 0) if place is None else (place.segment, place.byte_offset, place.byte_length, place.batch_row)
        )
        try:
            return _ROW.pack(
                *(*digests, *optional, before, root, node.depth, node.turns),
                *(call.prev_len, call.delta_len, call.sampled_tokens, *where),
                *(call.weight_version or 0, call.weight_version_end or 0),
                *(_names.number(text) for text in (call.mode, call.cause, prefix, place and place.writer)),
                *(self._preambles.index(node.preamble), flags),
            )
        except (struct.error, KeyError):
            return None

    def _find(self, call_id: str) -> int:
        """The number of a call; -1: it is not here. Who asks mostly asks for one of the last."""
        start = -1 if "\n" in call_id else self._ids.rfind(f"\n{call_id}\n".encode())
        if start < 0:
            return -1
        return start // self._width if self._width else self._ids.count(b"\n", 0, start)

    def _id(self, at: int) -> str:
        if self._width:
            return self._ids[1 + at * self._width : (at + 1) * self._width].decode()
        return self._ids.split(b"\n", at + 2)[at + 1].decode()

    def _at(self, at: int) -> Call:
        if self._odd is not None and at in self._odd:
            return self._odd[at]
        numbers: tuple[Any, ...] = _ROW.unpack_from(self._rows, at * _ROW.size)
        digest, text_digest, prompt_digest, request_digest = numbers[2:6]
        prev_len, delta_len, sampled = numbers[10:13]
        version, version_end, mode, cause, prefix, _, _, flags = numbers[17:]
        start = _names.optional(prefix)
        return Call(
            node=self._node(at),
            response_id=None if start is None else start + self._id(at),
            prev_len=prev_len,
            delta_len=delta_len,
            sampled_tokens=sampled,
            mode=_names.text(mode),
            cause=_names.optional(cause),
            weight_version=None if flags & _NO_VERSION else version,
            weight_version_end=None if flags & _NO_VERSION_END else version_end,
            digest=digest,
            prompt_digest=None if flags & _NO_PROMPT else prompt_digest,
            text_digest=text_digest,
            request_digest=None if flags & _NO_REQUEST else request_digest,
        )

    def _node(self, at: int) -> Node:
        """What a request needs of a call: a third of it."""
        if self._odd is not None and at in self._odd:
            return self._odd[at].node
        numbers: tuple[Any, ...] = _ROW.unpack_from(self._rows, at * _ROW.size)
        before, root, depth, turns, prev_len, delta_len, _, segment, offset, length, row = numbers[6:17]
        writer, preamble = numbers[22:24]
        return Node(
            call_id=self._id(at),
            parent_call_id=None if before < 0 else self._id(before),
            before=None if before < 0 else lambda: self._node(before),
            root_call_id="" if root < 0 else self._id(root),
            depth=depth,
            cum_len=prev_len + delta_len,
            chain_hash=numbers[0],
            fingerprint=self._fingerprints[at * _HASH : (at + 1) * _HASH],
            context=numbers[1],
            preamble=self._preambles[int(preamble)],
            turns=turns,
            reasoning=() if self._reasoning is None else self._reasoning.get(at, ()),
            place=None
            if writer == 0
            else Place(
                writer=_names.text(writer), segment=segment, byte_offset=offset, byte_length=length, batch_row=row
            ),
        )
