"""What was added comes back, whether it fits the packed form or not."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from tokenlake.errors import InvalidInput
from tokenlake.ingest.calls import Call, Calls, Node
from tokenlake.store.delta import Place


def hashed(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def call(name: str, parent: Call | None = None, *, node: dict[str, Any] | None = None, **more: Any) -> Call:
    prev_len = 0 if parent is None else parent.node.cum_len
    made = Node(
        call_id=name,
        parent_call_id=parent and parent.node.call_id,
        before=parent and parent.node,
        root_call_id=name if parent is None else parent.node.root_call_id,
        depth=0 if parent is None else parent.node.depth + 1,
        cum_len=prev_len + 7,
        chain_hash=hashed(name, 1),
        fingerprint=hashed(name, 2),
        context=hashed(name, 3),
        preamble=hashed("preamble"),
        turns=3,
        reasoning=(),
        place=Place(writer="gate", segment=4, byte_offset=5, byte_length=6, batch_row=0),
    )
    return replace(
        Call(
            node=replace(made, **(node or {})),
            response_id=f"resp_{name}",
            prev_len=prev_len,
            delta_len=7,
            sampled_tokens=2,
            mode="token_in",
            weight_version=3,
            weight_version_end=4,
            digest=hashed(name, 4),
            prompt_digest=hashed(name, 5),
            text_digest=hashed(name, 6),
            request_digest=hashed(name, 7),
        ),
        **more,
    )


ODD: list[dict[str, Any]] = [
    {},
    {"response_id": None},
    {"response_id": "another"},
    {"prompt_digest": None, "request_digest": None},
    {"weight_version": None, "weight_version_end": 0},
    {"weight_version": 0, "weight_version_end": None},
    {"weight_version": 2**40},
    {"cause": "no_match", "mode": "text"},
    {"prev_len": -1},
    {"delta_len": 2**31},
    {"digest": b"", "prompt_digest": b""},
    {"request_digest": b""},
    {"node": {"place": None}},
    {"node": {"place": Place(writer="w", segment=1, byte_offset=2**33, byte_length=1, batch_row=9)}},
    {"node": {"reasoning": ((1, b"12345678"),)}},
    {"node": {"preamble": b"", "context": b""}},
    {"node": {"fingerprint": b"short"}},
    {"node": {"root_call_id": "unknown"}},
    {"node": {"cum_len": 1}},
    {"node": {"parent_call_id": "unknown"}},
    {"digest": bytes(33)},
]


@pytest.mark.parametrize("more", ODD, ids=str)
def test_what_was_added_comes_back(more: dict[str, Any]) -> None:
    calls = Calls()
    root, other = call("root"), call("other")
    child = call("child", root, **more)
    last = call("last", child)
    for each in (root, other, child, last):
        calls.add(each)
    assert dict(calls) == {"root": root, "other": other, "child": child, "last": last}
    assert [*reversed(calls)] == ["last", "child", "other", "root"]
    assert calls["last"].node.chain() == [root.node, child.node, last.node]
    assert calls.saying(child.node.fingerprint) == [child.node]


def test_reasoning_is_found_along_the_chain_alone() -> None:
    calls = Calls()
    root = call("root", node={"reasoning": ((0, b"r"),)})
    odd = call("odd", root, node={"reasoning": ((2, b"o"),)}, digest=b"")
    for each in (root, call("side", root, node={"reasoning": ((2, b"s"),)}), odd, call("leaf", odd)):
        calls.add(each)
    assert calls.reasoning("leaf") == calls.reasoning("odd") == {0: b"r", 2: b"o"}
    assert calls.reasoning("side") == {0: b"r", 2: b"s"}
    assert calls.reasoning("unknown") == {}


def test_a_packed_call_holds_no_object() -> None:
    calls = Calls()
    for at in range(50):
        before = calls[f"c{at - 1}"] if at else None
        calls.add(call(f"c{at}", before))
    assert calls._odd is None
    assert [node.call_id for node in calls["c49"].node.chain()] == [f"c{at}" for at in range(50)]


def test_twins_come_in_commit_order_and_unknown_ids_are_unknown() -> None:
    calls = Calls()
    twins = [call("c0"), call("c00", node={"fingerprint": hashed("c0", 2)})]
    for each in (*twins, call("c1")):
        calls.add(each)
    assert calls.saying(hashed("c0", 2)) == [each.node for each in twins]
    assert calls.saying(hashed("none")) == []
    assert [name in calls for name in ("c0", "c00", "0", "c", "c0\nc00", "")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    with pytest.raises(KeyError):
        calls["c2"]
    with pytest.raises(InvalidInput):
        calls.add(call("c0\nc1"))


def test_a_fingerprint_across_two_calls_is_nobodys() -> None:
    calls = Calls()
    first, second = call("c0"), call("c1")
    calls.add(first)
    calls.add(second)
    assert calls.saying(first.node.fingerprint[16:] + second.node.fingerprint[:16]) == []
