"""The replay buffer: whole published groups, handed out once to each named consumer, in the order of publication.

There is no second store and nothing in memory: where every group stands is the view `claims`, a fold over lineage, and
every change is an event that is durable before it is answered. So a restarted service goes on where it was, and a
member that died gives its groups back when their lease ends. A consumer is a name that any number of members share;
each group goes to one of them. Groups of purpose `eval` are never handed out.

How old a group is, is judged by its oldest version. One that has become too old, or whose version nobody knows, is
evicted for that consumer (`rows_released`, reason `stale` or `unknown_version`); one from the future waits.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenlake import sql
from tokenlake.clock import now_us
from tokenlake.errors import Conflict, InvalidInput, NotFound
from tokenlake.ids import check_call_id, mint_call_id
from tokenlake.store.lake import OwnedLake

__all__ = ["LEASE_S", "Claim", "ClaimedGroup", "ReplayBuffer"]

LEASE_S = 600.0
"""Seconds that a claim lasts unless it says otherwise."""
_CHECKPOINT_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedGroup:
    """One group of a claim."""

    group_id: str
    n: int
    group_min_wv: int | None
    """The oldest weight version in its valid rows; None: unknown."""
    group_max_wv: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Groups that one member of a consumer holds, or held."""

    claim_id: str | None
    """None: there was nothing to hand out."""
    consumer: str
    state: str
    """`claimed`, `consumed` or `released`; `empty` without groups."""
    checkpoint: str | None
    """The trainer's checkpoint that they went into, once they are consumed."""
    deadline_at: int | None
    """When the lease ends, in microseconds since the epoch."""
    groups: tuple[ClaimedGroup, ...]


class ReplayBuffer:
    """Claims over the lake of its one owner. Thread-safe."""

    def __init__(self, lake: OwnedLake) -> None:
        self._lake = lake
        self._one = threading.Lock()

    def claim(
        self,
        consumer: str,
        *,
        groups: int = 1,
        current_version: int | None = None,
        max_staleness: int | None = None,
        lease_s: float = LEASE_S,
        idempotency_key: str | None = None,
        now: int | None = None,
    ) -> Claim:
        """Hand out up to `groups` whole groups; an empty claim when none is ready.

        `current_version`: the weights that the consumer trains; default: the published version. `max_staleness`: the
        most versions that a group's oldest may lie behind it; default: the policy. The same `idempotency_key` gives the
        same claim again. `now`: microseconds since the epoch, default the clock. Raises `InvalidInput`, also for a
        bound on staleness while no version is known.
        """
        check_call_id(consumer, "consumer")
        if groups < 1 or not 0 < lease_s < math.inf:
            raise InvalidInput("a claim is of at least 1 group, for more than 0 seconds", field="groups")
        if current_version is not None and not 0 <= current_version < 1 << 63:
            raise InvalidInput("a weight version is a whole number from 0 to 2**63 - 1", field="current_version")
        key = None if idempotency_key is None else _digest(consumer, idempotency_key)
        with self._one:
            if key is not None and (known := self._find(None, key, consumer)) is not None:
                return known
            now = now_us() if now is None else now
            version, bound = self._terms(current_version, max_staleness)
            back = [
                _event("rows_released", each, reason="lease_ended")
                for each in self._rows("ended_leases", consumer, now)
            ]
            if back:
                self._lake.lineage.append_many(back)
            waiting = self._rows("groups_to_claim", consumer, version, bound)
            taken = [each for each in waiting if each["age"] == "fresh"][:groups]
            claim_id = mint_call_id()
            named = {"consumer": consumer, "weight_version": version}
            events = [
                _event("rows_released", each, reason=each["age"], **named)
                for each in waiting
                if each["age"] in ("stale", "unknown_version")
            ]
            deadline = now + int(lease_s * 1e6)
            terms = {"claim_id": claim_id, "deadline_at": deadline, "idempotency_digest": key}
            events += [_event("rows_claimed", each, **named, **terms) for each in taken]
            if events:
                self._lake.lineage.append_many(events)
            return _claim(claim_id, consumer, "claimed", None, deadline, taken)

    def consume(self, claim_id: str, checkpoint: str) -> Claim:
        """Say that a claim's groups went into `checkpoint`; idempotent.

        Raises `NotFound`, and `Conflict` when they were given back meanwhile or went into another checkpoint.
        """
        if not 0 < len(checkpoint) <= _CHECKPOINT_CHARS:
            raise InvalidInput(f"a checkpoint is 1 to {_CHECKPOINT_CHARS} characters", field="checkpoint")
        with self._one:
            claim = self._known(claim_id)
            if claim.state == "consumed" and claim.checkpoint == checkpoint:
                return claim
            if claim.state != "claimed":
                into = "" if claim.checkpoint is None else f" into {claim.checkpoint}"
                raise Conflict(f"claim {claim_id} is {claim.state}{into}: its groups are not yours to consume")
            return self._settle(claim, "rows_consumed", "consumed", checkpoint=checkpoint)

    def release(self, claim_id: str) -> Claim:
        """Give a claim's groups back; idempotent. Raises `NotFound`, and `Conflict` when they were consumed."""
        with self._one:
            claim = self._known(claim_id)
            if claim.state == "released":
                return claim
            if claim.state != "claimed":
                raise Conflict(f"claim {claim_id} is {claim.state}: rewind its consumer instead")
            return self._settle(claim, "rows_released", "released", reason="released")

    def rewind(self, consumer: str, checkpoint: str | None) -> list[str]:
        """Give back what came after `checkpoint`, open claims included, and return those groups; idempotent.

        None: everything. Raises `NotFound` for a checkpoint that this consumer never reached or has gone back behind.
        """
        check_call_id(consumer, "consumer")
        with self._one:
            if checkpoint is not None and not self._rows("checkpoint", consumer, checkpoint)[0]["reached"]:
                raise NotFound(f"consumer {consumer} has no checkpoint {checkpoint} to go back to", consumer=consumer)
            after = self._rows("groups_after", consumer, checkpoint)
            if after:
                events = [_event("rows_released", each, reason="rewound", checkpoint=checkpoint) for each in after]
                self._lake.lineage.append_many(events)
                self._lake.lineage.anchor()
            return [each["group_id"] for each in after]

    def _terms(self, version: int | None, bound: int | None) -> tuple[int | None, int | None]:
        """The consumer's version and the bound on staleness that count."""
        (terms,) = self._rows("claim_terms")
        version = terms["published_version"] if version is None else version
        bound = terms["max_staleness"] if bound is None else bound
        if bound is not None and version is None:
            raise InvalidInput("max_staleness needs current_version, or a published version", field="current_version")
        return version, bound

    def _settle(self, claim: Claim, event_type: str, state: str, **columns: Any) -> Claim:
        named = {"consumer": claim.consumer, "claim_id": claim.claim_id}
        self._lake.lineage.append_many(
            [_event(event_type, {"group_id": group.group_id, **named}, **columns) for group in claim.groups]
        )
        self._lake.lineage.anchor()
        return Claim(
            claim_id=claim.claim_id,
            consumer=claim.consumer,
            state=state,
            checkpoint=columns.get("checkpoint"),
            deadline_at=claim.deadline_at,
            groups=claim.groups,
        )

    def _known(self, claim_id: str) -> Claim:
        claim = self._find(check_call_id(claim_id, "claim_id"), None, None)
        if claim is None:
            raise NotFound(f"no claim {claim_id}", claim_id=claim_id)
        return claim

    def _find(self, claim_id: str | None, key: bytes | None, consumer: str | None) -> Claim | None:
        rows = self._rows("claim", claim_id, key, consumer)
        if not rows:
            return None
        first = rows[0]
        checkpoint = first["checkpoint"] if first["state"] == "consumed" else None
        return _claim(first["claim_id"], first["consumer"], first["state"], checkpoint, first["deadline_us"], rows)

    def _rows(self, read: str, *params: Any) -> list[dict[str, Any]]:
        return self._lake.sql(sql.read(f"reads/{read}"), list(params)).to_arrow_table().to_pylist()


def _event(event_type: str, row: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """An event about the group of `row`, of the consumer and claim that it names."""
    named = {name: row[name] for name in ("group_id", "consumer", "claim_id") if name in row}
    return {"event_type": event_type, **named, **columns}


def _claim(
    claim_id: str | None,
    consumer: str,
    state: str,
    checkpoint: str | None,
    deadline_at: int,
    rows: Sequence[dict[str, Any]],
) -> Claim:
    names = ("group_id", "n", "group_min_wv", "group_max_wv")
    return Claim(
        claim_id=claim_id if rows else None,
        consumer=consumer,
        state=state if rows else "empty",
        checkpoint=checkpoint,
        deadline_at=deadline_at if rows else None,
        groups=tuple(ClaimedGroup(**{name: row[name] for name in names}) for row in rows),
    )


def _digest(consumer: str, key: str) -> bytes:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (consumer.encode(), key.encode()))
    return hashlib.sha256(b"tokenlake.claim.1" + framed).digest()
