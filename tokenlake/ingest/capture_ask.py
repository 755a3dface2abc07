"""What a gate asks of a capture worker besides an answer: `ng_capture`, written and read in one place.

The gate names the call, and of its parent's chain where every delta lies and what it must hash to. No token travels:
the worker reads the exact prefix from the lake, and answers coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, get_args

from tokenlake.errors import InvalidInput
from tokenlake.ids import check_call_id, split_rollout_id
from tokenlake.ingest.calls import Node
from tokenlake.ingest.coords import place_of
from tokenlake.ingest.resolve import Cause

__all__ = ["CALL_PATH", "CAPTURE_PATH", "WEIGHTS_PATH", "CaptureAsk"]

CAPTURE_PATH = "/v1/tokenlake/capture"
"""Where a worker says that it captures, and what it is."""
CALL_PATH = "/v1/tokenlake/chat/completions"
"""Where a worker takes captured calls: a server that does not capture has no such route, and answers 404."""
WEIGHTS_PATH = "/v1/tokenlake/weights"
"""Where a trainer says which version the weights are that it has loaded into a worker."""
_MAX = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureAsk:
    """One call that is to be captured."""

    rollout_id: str
    attempt: int
    call_id: str
    parent: Node | None
    """With its chain, each with its place; None asks for a root."""
    cause: Cause | None
    """Why a root is asked for."""

    def to_json(self) -> dict[str, Any]:
        """The value of `ng_capture`."""
        parent = self.parent
        return {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "call_id": self.call_id,
            "cause": self.cause,
            "parent_call_id": parent and parent.call_id,
            "prev_len": 0 if parent is None else parent.cum_len,
            "parent_chain_hash": parent and parent.chain_hash.hex(),
            "parent_messages": 0 if parent is None else parent.turns,
            "chain": [] if parent is None else [_link(node) for node in parent.chain()],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read it back; raises `ValueError` for another shape, or where it contradicts itself."""
        try:
            parent: Node | None = None
            for link in body["chain"]:
                parent = _node(link, parent, int(body["parent_messages"]))
            made = cls(
                rollout_id=body["rollout_id"],
                attempt=body["attempt"],
                call_id=body["call_id"],
                parent=parent,
                cause=body["cause"],
            )
            split_rollout_id(made.rollout_id)
            check_call_id(made.call_id)
            whole = type(made.attempt) is int and 0 <= made.attempt < _MAX
            known = made.cause in get_args(Cause) if parent is None else made.cause is None
            if not (whole and known) or made.to_json() != dict(body):
                raise ValueError("it contradicts itself")
        except (AttributeError, InvalidInput, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"ng_capture is malformed: {error}") from error
        return made


def _link(node: Node) -> dict[str, Any]:
    return {
        "call_id": node.call_id,
        "cum_len": node.cum_len,
        "chain_hash": node.chain_hash.hex(),
        "place": node.place and asdict(node.place),
    }


def _node(link: Mapping[str, Any], parent: Node | None, turns: int) -> Node:
    place = link["place"]
    return Node(
        call_id=link["call_id"],
        parent_call_id=parent and parent.call_id,
        before=parent,
        root_call_id=link["call_id"] if parent is None else parent.root_call_id,
        depth=0 if parent is None else parent.depth + 1,
        cum_len=link["cum_len"],
        chain_hash=bytes.fromhex(link["chain_hash"]),
        fingerprint=b"",
        context=b"",
        preamble=b"",
        turns=turns,
        reasoning=(),
        place=None if place is None else place_of(place),
    )
