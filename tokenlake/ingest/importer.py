"""Import: captured calls from elsewhere, through the same capture core as live ones.

A file is taken whole or not at all. It is read and judged first, without a write; then its deltas are staged; then all
its lineage events go down as one atomic batch. A kill before that batch leaves deltas that no event names, which a
second import of the same file finds and uses.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenlake.errors import ImportRefused, NotFound
from tokenlake.ids import rollout_id
from tokenlake.ingest.capture import CaptureCore, Claims, ParentLink
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.import_format import (
    CallRecord,
    FailRecord,
    GroupRecord,
    Record,
    SealRecord,
    converted,
    read_records,
)
from tokenlake.ingest.import_sources import SOURCES
from tokenlake.ingest.import_state import Attempt, ImportState, KnownCall, seal_end
from tokenlake.store.delta import Delta, Place, same_content
from tokenlake.store.lake import OwnedLake

__all__ = ["ImportResult", "import_file"]

_WRITER = "import"
_NOWHERE = Place(writer=_WRITER, segment=0, byte_offset=0, byte_length=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """What an import added; all zero when everything was there already."""

    groups: int
    calls: int
    seals: int
    fails: int
    unchanged: int
    """Records that were in the lake with the same content."""


class _Collector:
    """A stager that keeps the delta for later: judging a file writes nothing."""

    def __init__(self) -> None:
        self.delta: Delta | None = None

    def stage(self, delta: Delta) -> Place:
        self.delta = delta
        return _NOWHERE


@dataclass(slots=True)
class _Plan:
    """What the file adds, in order; a call's event waits for the place of its delta."""

    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    deltas: list[tuple[int, Delta]] = field(default_factory=list[tuple[int, Delta]])
    seals: list[tuple[SealRecord, Attempt]] = field(default_factory=list[tuple[SealRecord, Attempt]])
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("group", "call", "seal", "fail", "same"), 0))


def import_file(
    lake: OwnedLake, path: Path, *, source: str | None = None, progress: Callable[[int], None] | None = None
) -> ImportResult:
    """Import one JSONL file into an owned lake; `source` names the system that wrote it (`SOURCES`), None: Tokenlake's.

    Raises `ImportRefused` (with `detail["line"]`) when a record is malformed or exists with other content, before
    anything is kept. `progress` is called with the number of records judged so far.
    """
    state = ImportState(lake)
    plan = _Plan()
    records = read_records(path) if source is None else converted(SOURCES[source](path))
    for count, record in enumerate(records, start=1):
        _judge(state, plan, record)
        if progress is not None:
            progress(count)
    for seal, attempt in plan.seals:
        _plan_seal(plan, attempt, seal)
    if plan.events:
        _write(lake, plan, path)
    return ImportResult(
        groups=plan.counts["group"],
        calls=plan.counts["call"],
        seals=plan.counts["seal"],
        fails=plan.counts["fail"],
        unchanged=plan.counts["same"],
    )


def _write(lake: OwnedLake, plan: _Plan, path: Path) -> None:
    writer = lake.delta_writer(_WRITER)
    for position, delta in plan.deltas:
        place = _kept(lake, delta) or writer.stage(delta)
        plan.events[position] |= place.columns()
    summary = {"file": path.name, **plan.counts}
    plan.events.append({"event_type": "import_committed", "detail": json.dumps(summary, sort_keys=True)})
    lake.lineage.append_many(plan.events)


def _kept(lake: OwnedLake, delta: Delta) -> Place | None:
    """Where a record lies already, all of it: a loss of power may have left a part of one that was not acknowledged."""
    known = lake.find_delta(delta.rollout_id, delta.attempt, delta.call_id)
    if known is None or known[1] != delta.digest:
        return None
    try:
        return known[0] if same_content(lake.read_delta(known[0]), delta) else None
    except NotFound:
        return None


def _refuse(record: Record, why: str) -> ImportRefused:
    return ImportRefused(f"line {record.line}: {why}; nothing was imported", line=record.line)


def _judge(state: ImportState, plan: _Plan, record: Record) -> None:
    if isinstance(record, GroupRecord):
        _plan_group(state, plan, record)
        return
    attempt = _attempt(state, plan, record)
    if isinstance(record, CallRecord):
        _plan_call(plan, attempt, record)
    elif isinstance(record, SealRecord):
        plan.seals.append((record, attempt))
    else:
        _plan_fail(plan, attempt, record)


def _plan_group(state: ImportState, plan: _Plan, record: GroupRecord) -> None:
    meta = None if record.meta is None else json.dumps(record.meta, sort_keys=True)
    known = state.group(record.group_id)
    if known is not None:
        if (known.n, known.purpose, known.meta) != (record.n, record.purpose, meta):
            raise _refuse(record, f"group {record.group_id} exists with other content")
        plan.counts["same"] += 1
        return
    state.add_group(record.group_id, n=record.n, purpose=record.purpose, meta=meta)
    plan.counts["group"] += 1
    plan.events.append(
        {
            "event_type": "group_registered",
            "group_id": record.group_id,
            "n": record.n,
            "purpose": record.purpose,
            "detail": meta,
        }
    )


def _attempt(state: ImportState, plan: _Plan, record: CallRecord | SealRecord | FailRecord) -> Attempt:
    group = state.group(record.group_id)
    if group is None:
        raise _refuse(record, f"group {record.group_id} is unknown: give its group record first")
    if record.index >= group.n:
        raise _refuse(record, f"{record.rollout_id} is outside its group of {group.n}")
    attempt = state.attempt(record.rollout_id, record.attempt)
    if attempt is None:
        if group.published:
            raise _refuse(record, f"group {record.group_id} is published: it takes no new attempt")
        attempt = state.add_attempt(record.rollout_id, record.attempt)
        plan.events.append(
            {
                "event_type": "rollout_registered",
                "group_id": record.group_id,
                "rollout_id": rollout_id(record.group_id, record.index),
                "attempt": record.attempt,
            }
        )
    return attempt


def _plan_call(plan: _Plan, attempt: Attempt, record: CallRecord) -> None:
    link, prompt = _link(attempt, record)
    collector = _Collector()
    core = CaptureCore(collector, strict=False)
    ticket = core.begin(
        rollout_id=record.rollout_id,
        attempt=record.attempt,
        call_id=record.call_id,
        parent=link,
        sampling=record.sampling,
    )
    coords = core.complete(
        ticket,
        prompt_token_ids=prompt,
        token_ids=record.generation_token_ids,
        logprobs=record.generation_logprobs,
        finish_reason=record.finish_reason,
        weight_version=record.weight_version,
        weight_version_end=record.weight_version_end,
        extras=record.extras,
        claims=Claims(mode=record.mode, digest=record.digest),
    )
    if coords.disposition != "staged" or collector.delta is None:
        raise _refuse(record, f"call {record.call_id} cannot be captured: {coords.reason}")
    known = attempt.calls.get(record.call_id)
    if known is not None:
        if (known.digest, known.response_id) != (coords.digest, record.response_id):
            raise _refuse(record, f"call {record.call_id} of {record.rollout_id} exists with other content")
        if not attempt.knows_sequence(known):
            attempt.add_call(known, array("i", [*prompt, *record.generation_token_ids]).tobytes())
        plan.counts["same"] += 1
        return
    if attempt.retired:
        raise _refuse(record, f"{record.rollout_id} is retired: it takes no new call")
    _remember(attempt, record, coords, prompt)
    plan.counts["call"] += 1
    plan.deltas.append((len(plan.events), collector.delta))
    plan.events.append(
        coords.columns()
        | {
            "event_type": "call_committed",
            "group_id": record.group_id,
            "response_id": record.response_id,
            "detail": _difference(attempt, record, prompt),
        }
    )


def _link(attempt: Attempt, record: CallRecord) -> tuple[ParentLink | None, list[int]]:
    """The parent as it is claimed or found, and the whole prompt as far as it is known."""
    prompt = record.prompt_token_ids
    if prompt is not None and not record.parent_given:
        parent = attempt.longest_prefix(prompt, before=record.call_id)
        prev_len = parent.cum_len if parent is not None and record.prev_len is None else record.prev_len
        if parent is None and not prev_len:
            return None, prompt
        if parent is not None:
            return _as_link(attempt, parent, prev_len or 0), prompt
    elif record.parent_call_id is None:
        return None, prompt or []
    claimed = record.parent_call_id
    known = None if claimed is None else attempt.calls.get(claimed)
    if known is None:
        given = record.prompt_suffix_token_ids
        prev_len = record.prev_len or 0
        whole = prompt if prompt is not None else [0] * prev_len + (given or [])
        if claimed is None:
            return None, whole
        prefix = attempt.hash_of(whole[:prev_len])
        link = ParentLink(call_id=claimed, root_call_id=None, depth=None, cum_len=prev_len, chain_hash=prefix)
        return link, whole
    if not attempt.knows_sequence(known):
        raise _refuse(
            record, f"call {claimed} of {record.rollout_id} is retired: give it before those that continue it"
        )
    prev_len = known.cum_len if record.prev_len is None else record.prev_len
    if prompt is None:
        exact = attempt.sequence(known)
        prompt = (exact[:prev_len] + [0] * (prev_len - len(exact))) + (record.prompt_suffix_token_ids or [])
    return _as_link(attempt, known, prev_len), prompt


def _as_link(attempt: Attempt, parent: KnownCall, prev_len: int) -> ParentLink:
    return ParentLink(
        call_id=parent.call_id,
        root_call_id=parent.root_call_id,
        depth=parent.depth,
        cum_len=prev_len,
        chain_hash=parent.chain_hash,
        token_ids=attempt.raw_sequence(parent),
    )


def _difference(attempt: Attempt, record: CallRecord, prompt: list[int]) -> str | None:
    """Where a prompt first leaves the sequence of the parent it claims; a position, never an id."""
    known = None if record.parent_call_id is None else attempt.calls.get(record.parent_call_id)
    if known is None or record.prompt_token_ids is None:
        return None
    exact = attempt.sequence(known)
    if prompt[: len(exact)] == exact:
        return None
    pairs = enumerate(zip(exact, prompt, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(exact), len(prompt)))
    return json.dumps({"first_difference": first})


def _remember(attempt: Attempt, record: CallRecord, coords: Coords, prompt: list[int]) -> None:
    attempt.add_call(
        KnownCall(
            call_id=record.call_id,
            parent_call_id=coords.parent_call_id,
            root_call_id=coords.root_call_id,
            depth=coords.depth,
            cum_len=coords.cum_len,
            chain_hash=coords.chain_hash or b"",
            digest=coords.digest or b"",
            response_id=record.response_id,
        ),
        array("i", [*prompt, *record.generation_token_ids]).tobytes(),
    )


def _plan_fail(plan: _Plan, attempt: Attempt, record: FailRecord) -> None:
    if attempt.ended is not None:
        if attempt.ended != ("fail", record.reason):
            raise _refuse(record, f"{record.rollout_id} attempt {record.attempt} has ended otherwise")
        plan.counts["same"] += 1
        return
    _open_for_end(attempt, record)
    attempt.ended = ("fail", record.reason)
    plan.counts["fail"] += 1
    plan.events.append(
        {
            "event_type": "rollout_failed",
            "group_id": record.group_id,
            "rollout_id": record.rollout_id,
            "attempt": record.attempt,
            "reason": record.reason,
        }
    )


def _plan_seal(plan: _Plan, attempt: Attempt, record: SealRecord) -> None:
    terminal, selection, reason = _terminal(attempt, record)
    end = seal_end(record.reward, terminal, reason)
    if attempt.ended is not None:
        if attempt.ended != end:
            raise _refuse(record, f"{record.rollout_id} attempt {record.attempt} has ended otherwise")
        plan.counts["same"] += 1
        return
    _open_for_end(attempt, record)
    attempt.ended = end
    plan.counts["seal"] += 1
    plan.events.append(
        {
            "event_type": "rollout_sealed",
            "group_id": record.group_id,
            "rollout_id": record.rollout_id,
            "attempt": record.attempt,
            "reward": record.reward,
            "terminal_call_id": terminal,
            "terminal_selection": selection,
            "reason": reason,
        }
    )


def _open_for_end(attempt: Attempt, record: SealRecord | FailRecord) -> None:
    if attempt.published:
        raise _refuse(record, f"group {record.group_id} is published: its rollouts take no other end")


def _terminal(attempt: Attempt, record: SealRecord) -> tuple[str | None, str | None, str | None]:
    """(terminal call id, how it was selected, reason) by the evidence of the seal record.

    A declared call is taken as claimed (the views say `terminal_unknown` when it is not there). Witnesses that disagree
    attribute nothing.
    """
    by_response: set[str] | None = None
    if record.terminal_response_id is not None:
        by_response = {c.call_id for c in attempt.calls.values() if c.response_id == record.terminal_response_id}
    if record.terminal_call_id is not None:
        if by_response is not None and record.terminal_call_id not in by_response:
            return None, None, "terminal_ambiguous"
        return record.terminal_call_id, "declared", None
    if by_response is None:
        return None, None, None
    if len(by_response) != 1:
        return None, None, "terminal_ambiguous" if by_response else "terminal_unknown"
    return by_response.pop(), "response_id", None
