"""Every kind of damage, made on the bytes of a lake on disk, is found, named and located by `tokenlake audit`."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import CaseLake, call, fail, group, seal
from tests.cases.forger import deltas, event, flip, lineage, messages, one, rewrite, rows
from tokenlake.store.schema import DELTA

Record = dict[str, Any]
Finding = dict[str, Any]
FAULT, NOTICE = "fault", "notice"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two published groups: three calls in a row, a fork, a placeholder, another attempt."""
    from tokenlake.api import cli

    folder = tmp_path_factory.mktemp("pristine")
    lake = folder / "lake"
    case = CaseLake(lake, None)  # type: ignore[arg-type]  # nothing is captured here
    sampling = {"temperature": 0.75, "top_p": 1.0, "top_k": None, "logprob_mode": "raw"}
    file = case.write(
        group("g", 2),
        call("g_g0", "c0", [70001, 70002], [70003, 9], generation_logprobs=[-0.125, -0.25], sampling=sampling),
        call("g_g0", "c1", [70001, 70002, 70003, 9, 5], [70006, 9], weight_version=8, extras={"note": "abc"}),
        call("g_g0", "c2", [70001, 70002, 70003, 9, 5, 70006, 9, 5], [70007], weight_version=8),
        call("g_g0", "fork", [70001, 70002, 70003, 9, 6], [70008], weight_version=8),
        seal("g_g0", 0.625, terminal_call_id="c2"),
        fail("g_g1", "environment_failed"),
        group("h", 1),
        call("h_g0", "c9", [81, 82], [83], attempt=0),
        call("h_g0", "c9b", [81, 82], [84], attempt=1),
        seal("h_g0", 0.5, terminal_call_id="c9b", attempt=1),
    )
    assert cli.main(["import", "--lake", str(lake), str(file)]) == 0
    assert cli.main(["finalize", "--lake", str(lake)]) == 0
    return lake


@pytest.fixture
def lake(pristine: Path, case: CaseLake) -> CaseLake:
    shutil.copytree(pristine, case.path)
    return case


def segment(path: Path) -> Path:
    return one(path.glob("deltas/*/*.arrow"))


def anchor(path: Path) -> Path:
    return one(path.glob("lineage/*/head.json"))


def i32(value: int) -> bytes:
    return struct.pack("<i", value)


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def overwrite(path: Path, at: int, new: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + new + data[at + len(new) :])


def set_in(records: dict[str, Record], name: str, **values: Any) -> None:
    records[name] |= values


def swap(records: dict[str, Record], a: str, b: str, *names: str) -> None:
    for name in names:
        records[a][name], records[b][name] = records[b][name], records[a][name]


def copy_of(path: Path, target: str) -> None:
    source = segment(path)
    shutil.copy(source, source.with_name(target))


def add_record(records: dict[str, Record], name: str, like: str, **values: Any) -> None:
    records[name] = records[like] | values


def second(path: Path) -> None:
    """Another record under the key of c1, in a segment of its own, that is sound in itself."""
    copy_of(path, "000007.arrow")
    first = segment_named(path, "000000.arrow")
    data = first.read_bytes()
    first.unlink()
    deltas(path, alone, redigest=True)
    first.write_bytes(data)


def alone(records: dict[str, Record]) -> None:
    """Only c1, with other logprobs."""
    kept = records["g_g0/c1"] | {"logprobs": [0.0, -0.5, -1.0]}
    records.clear()
    records["g_g0/c1"] = kept


def segment_named(path: Path, name: str) -> Path:
    return one(path.glob(f"deltas/*/{name}"))


def edit_event(event_type: str, where: Record, **values: Any) -> Callable[[list[Record]], None]:
    return lambda events: event(events, event_type, **where).update(values)


def without(event_type: str, **where: Any) -> Callable[[list[Record]], list[Record]]:
    def edit(events: list[Record]) -> list[Record]:
        gone = event(events, event_type, **where)
        return [e for e in events if e is not gone]

    return edit


def again(event_type: str, **values: Any) -> Callable[[list[Record]], list[Record]]:
    def edit(events: list[Record]) -> list[Record]:
        return [*events, event(events, event_type) | {"at": events[-1]["at"] + 1} | values]

    return edit


def exchange(events: list[Record]) -> list[Record]:
    """Two events change places, each keeping all it says but its number."""
    a = next(i for i, e in enumerate(events) if e.get("call_id") == "c1")
    x, y = events[a], events[a + 1]
    x["event_seq"], y["event_seq"] = y["event_seq"], x["event_seq"]
    return [*events[:a], y, x, *events[a + 2 :]]


def cycle(events: list[Record]) -> None:
    """The first two calls name each other as parents."""
    event(events, "call_committed", **C0).update(parent_call_id="c1", depth=None)
    event(events, "call_committed", **C1).update(parent_call_id="c0", depth=None)


C0 = {"rollout_id": "g_g0", "call_id": "c0"}
C1 = {"rollout_id": "g_g0", "call_id": "c1"}
C2 = {"rollout_id": "g_g0", "call_id": "c2"}
DELTAS, ROWS, LINEAGE = "deltas/import/", "rows/0", "lineage/"

DAMAGE: dict[str, tuple[Callable[[Path], Any], list[Finding]]] = {
    # bytes of deltas
    "a bit of a token id": (
        lambda p: flip(segment(p), i32(70006)),
        [{"kind": "digest_mismatch", "place": DELTAS, **C1}],
    ),
    "a bit of a mask": (
        lambda p: flip(segment(p), b"\0\1\1\0\0\0\0\0", b"\1\1\1\0\0\0\0\0"),
        [{"kind": "digest_mismatch", **C1}],
    ),
    "a bit of a logprob": (lambda p: flip(segment(p), f32(-0.125)), [{"kind": "digest_mismatch", **C0}]),
    "a bit of the sampling": (
        lambda p: flip(segment(p), struct.pack("<d", 0.75)),
        [{"kind": "digest_mismatch", **C0}],
    ),
    "extras": (lambda p: flip(segment(p), b'{"note":"abc"}', b'{"note":"abd"}'), [{"kind": "digest_mismatch", **C1}]),
    "a message of a segment": (
        lambda p: overwrite(segment(p), messages(segment(p))[1][0], b"\7" * 16),
        [{"kind": "segment_damaged", "place": "deltas/import/000000.arrow"}, {"kind": "delta_missing", **C1}],
    ),
    "the head of a segment": (
        lambda p: flip(segment(p), b"ARROW1", b"ARROW7"),
        [{"kind": "delta_missing", **C0}, {"kind": "delta_missing", **C2}],
    ),
    "a segment cut between two records": (
        lambda p: cut(segment(p), messages(segment(p))[2][0]),
        [{"kind": "delta_missing", **C2}],
    ),
    "a segment cut inside a record": (
        lambda p: cut(segment(p), messages(segment(p))[2][1] - 5),
        [{"kind": "delta_missing", **C2}],
    ),
    "a missing segment": (lambda p: segment(p).unlink(), [{"kind": "delta_missing", **C0}]),
    "a segment with other records in its place": (
        lambda p: rewrite(segment(p), DELTA, lambda all_: [all_[0] | {"rollout_id": "x_g0"}]),
        [{"kind": "delta_missing", **C0}],
    ),
    # records that were written anew
    "two answers swapped": (
        lambda p: deltas(p, lambda all_: swap(all_, "g_g0/c1", "g_g0/fork", "token_ids", "token_mask", "logprobs")),
        [{"kind": "digest_mismatch", **C1}, {"kind": "digest_mismatch", "call_id": "fork"}],
    ),
    "two records swapped": (
        lambda p: deltas(p, lambda all_: swap(all_, "g_g0/c1", "g_g0/c2", "call_id")),
        [{"kind": "digest_mismatch", **C1}, {"kind": "digest_mismatch", **C2}],
    ),
    "a record edited and its digest made anew": (
        lambda p: deltas(p, lambda all_: set_in(all_, "g_g0/c1", logprobs=[0.0, -0.5, -1.0]), redigest=True),
        [{"kind": "lineage_mismatch", **C1}],
    ),
    "a record of another weight version": (
        lambda p: deltas(p, lambda all_: set_in(all_, "g_g0/c1", weight_version=9), redigest=True),
        [{"kind": "weight_version_mismatch", **C1}],
    ),
    "a record of a newer schema": (
        lambda p: deltas(p, lambda all_: set_in(all_, "g_g0/c1", schema_version=2), redigest=True),
        [{"kind": "unknown_schema", **C1}],
    ),
    "a record of another parent": (
        lambda p: deltas(p, lambda all_: set_in(all_, "g_g0/c1", parent_call_id="c9"), redigest=True),
        [{"kind": "lineage_mismatch", **C1}],
    ),
    "a second record under one key": (second, [{"kind": "duplicate_record", **C1}]),
    "a record that nobody committed": (
        lambda p: deltas(p, lambda all_: add_record(all_, "new", "g_g0/c1", call_id="c7"), redigest=True),
        [{"kind": "uncommitted_record", "severity": NOTICE, "rollout_id": "g_g0", "call_id": "c7"}],
    ),
    "version spans that say something else": (
        lambda p: deltas(
            p, lambda all_: set_in(all_, "g_g0/c1", weight_version_spans=[{"version": 3, "start": 0, "end": 2}])
        ),
        [{"kind": "weight_version_mismatch", **C1}],
    ),
    # events
    "a bit of a reward": (
        lambda p: lineage(p, edit_event("rollout_sealed", {"rollout_id": "g_g0"}, reward=0.875)),
        [
            {"kind": "event_hash_mismatch", "place": LINEAGE, "rollout_id": "g_g0"},
            {"kind": "row_differs", "place": ROWS},
        ],
    ),
    "a call's place edited": (
        lambda p: lineage(p, edit_event("call_committed", C1, byte_offset=8)),
        [{"kind": "event_hash_mismatch", **C1}],
    ),
    "an event removed": (
        lambda p: lineage(p, without("call_committed", **C1)),
        [{"kind": "lineage_broken", "place": LINEAGE}, {"kind": "uncommitted_record", "severity": NOTICE, **C1}],
    ),
    "an event written twice": (
        lambda p: lineage(p, lambda events: [*events, event(events, "call_committed", **C1)]),
        [{"kind": "lineage_broken", "place": LINEAGE}, {"kind": "duplicate_commit", **C1}],
    ),
    "two events in the wrong order": (
        lambda p: lineage(p, exchange),
        [{"kind": "lineage_broken", "place": LINEAGE}, {"kind": "event_hash_mismatch", **C1}],
    ),
    "a log cut at a boundary": (
        lambda p: lineage(p, lambda events: events[:-1]),
        [{"kind": "lineage_lost", "place": LINEAGE}],
    ),
    "a truncated anchor": (lambda p: cut(anchor(p), 9), [{"kind": "lineage_lost", "place": LINEAGE}]),
    "a removed anchor": (lambda p: anchor(p).unlink(), [{"kind": "lineage_lost", "place": LINEAGE}]),
    "an anchor of another log": (
        lambda p: anchor(p).write_text('{"event_seq": 1, "event_hash": "' + "0" * 64 + '"}'),
        [{"kind": "lineage_lost", "place": LINEAGE}],
    ),
    "the whole log gone": (
        lambda p: [shutil.rmtree(folder) for folder in p.glob("lineage/*")],
        [
            {"kind": "group_unregistered", "group_id": "g", "place": ROWS},
            {"kind": "uncommitted_record", "severity": NOTICE, **C1},
        ],
    ),
    # a log forged as a whole: hashes and anchor made anew
    "a forged parent": (
        lambda p: lineage(p, edit_event("call_committed", C2, parent_call_id="c0"), rehash=True),
        [{"kind": "parent_length_mismatch", **C2}, {"kind": "lineage_mismatch", **C2}],
    ),
    "a parent that is not there": (
        lambda p: lineage(p, edit_event("call_committed", C2, parent_call_id="nobody", depth=None), rehash=True),
        [{"kind": "parent_missing", **C2}],
    ),
    "a parent of another attempt": (
        lambda p: lineage(
            p,
            edit_event("call_committed", {"call_id": "c9b"}, parent_call_id="c9", depth=None),
            rehash=True,
        ),
        [{"kind": "parent_foreign", "rollout_id": "h_g0", "call_id": "c9b"}],
    ),
    "a cycle": (
        lambda p: lineage(
            p,
            cycle,
            rehash=True,
        ),
        [{"kind": "parent_cycle", **C0}, {"kind": "parent_cycle", **C1}],
    ),
    "a forged digest": (
        lambda p: lineage(p, edit_event("call_committed", C1, digest=bytes(32)), rehash=True),
        [{"kind": "lineage_mismatch", **C1}],
    ),
    "a forged length": (
        lambda p: lineage(p, edit_event("call_committed", C1, sampled_tokens=1), rehash=True),
        [{"kind": "lineage_mismatch", **C1}],
    ),
    "a forged weight version": (
        lambda p: lineage(p, edit_event("call_committed", C1, weight_version=9), rehash=True),
        [{"kind": "weight_version_mismatch", **C1}],
    ),
    "a forged reward": (
        lambda p: lineage(p, edit_event("rollout_sealed", {"rollout_id": "g_g0"}, reward=9.0), rehash=True),
        [{"kind": "row_differs", "rollout_id": "g_g0", "place": ROWS}],
    ),
    "a forged terminal": (
        lambda p: lineage(p, edit_event("rollout_sealed", {"rollout_id": "g_g0"}, terminal_call_id="c1"), rehash=True),
        [{"kind": "row_differs", "rollout_id": "g_g0", "place": ROWS}],
    ),
    "a group made larger": (
        lambda p: lineage(p, edit_event("group_registered", {"group_id": "g"}, n=3), rehash=True),
        [{"kind": "group_incomplete", "group_id": "g", "place": ROWS}],
    ),
    "a group made smaller": (
        lambda p: lineage(p, edit_event("group_registered", {"group_id": "g"}, n=1), rehash=True),
        [{"kind": "group_incomplete", "group_id": "g"}, {"kind": "rollout_outside_group", "rollout_id": "g_g1"}],
    ),
    "a group that nobody registered": (
        lambda p: lineage(p, without("group_registered", group_id="h"), rehash=True),
        [{"kind": "group_unregistered", "group_id": "h", "call_id": "c9", "place": LINEAGE}],
    ),
    "an attempt that nobody registered": (
        lambda p: lineage(p, without("rollout_registered", rollout_id="h_g0", attempt=1), rehash=True),
        [{"kind": "attempt_unregistered", "rollout_id": "h_g0", "call_id": "c9b"}],
    ),
    "a call after the end": (
        lambda p: lineage(p, again("call_committed", call_id="late"), rehash=True),
        [{"kind": "late_call", "severity": NOTICE, "call_id": "late"}, {"kind": "delta_missing", "call_id": "late"}],
    ),
    "a call committed twice": (
        lambda p: lineage(p, again("call_committed"), rehash=True),
        [{"kind": "duplicate_commit", **C0}],
    ),
    # rows
    "a bit of a row": (
        lambda p: flip(min(p.glob("rows/*.arrow")), i32(70006)),
        [{"kind": "row_digest_mismatch", "rollout_id": "g_g0", "place": ROWS}, {"kind": "row_differs"}],
    ),
    "a row edited and its digest made anew": (
        lambda p: rows(p, lambda all_: all_[0].update(reward=2.0), redigest=True),
        [{"kind": "row_differs", "rollout_id": "g_g0", "place": ROWS}],
    ),
    "a placeholder made valid": (
        lambda p: rows(p, lambda all_: all_[1].update(sample_mask=1, reason=None, reward=1.0), redigest=True),
        [{"kind": "row_malformed", "rollout_id": "g_g1", "place": ROWS}],
    ),
    "a row's version edited": (
        lambda p: rows(p, lambda all_: all_[0].update(group_min_wv=8), redigest=True),
        [{"kind": "row_differs", "rollout_id": "g_g0"}],
    ),
    "a row's bookkeeping edited": (
        lambda p: rows(p, lambda all_: all_[0].update(call_ids=["c0", "fork", "c2"], turns=9), redigest=True),
        [{"kind": "row_differs", "rollout_id": "g_g0"}],
    ),
    "a row removed": (
        lambda p: rows(p, lambda all_: all_[:1]),
        [{"kind": "group_incomplete", "group_id": "g", "place": ROWS}],
    ),
    "a row written twice": (
        lambda p: rows(p, lambda all_: [*all_, all_[0]]),
        [{"kind": "duplicate_row", "rollout_id": "g_g0", "place": ROWS}],
    ),
    "a row of another group among them": (
        lambda p: rows(p, lambda all_: [*all_, all_[0] | {"sample_id": "g_g7", "rollout_id": "g_g7"}], redigest=True),
        [{"kind": "group_incomplete", "group_id": "g", "place": ROWS}],
    ),
    "a file of rows removed": (
        lambda p: min(p.glob("rows/*.arrow")).unlink(),
        [{"kind": "group_incomplete", "group_id": "g", "place": ROWS}],
    ),
    "a file of rows cut": (
        lambda p: cut(min(p.glob("rows/*.arrow")), 3000),
        [{"kind": "group_incomplete", "group_id": "g", "place": ROWS}],
    ),
}


def missing(findings: list[Finding], wanted: list[Finding]) -> Iterator[Finding]:
    for want in wanted:
        expected = {"severity": FAULT} | want
        place = expected.pop("place", "")
        if not any(expected.items() <= found.items() and str(found["place"]).startswith(place) for found in findings):
            yield want


def test_a_sound_lake_has_no_finding(lake: CaseLake) -> None:
    assert lake.audit() == (0, [])


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_named_and_located(lake: CaseLake, name: str) -> None:
    harm, wanted = DAMAGE[name]
    harm(lake.path)
    status, findings = lake.audit()
    assert list(missing(findings, wanted)) == [], json.dumps(findings, indent=1)
    assert status == (1 if any(each.get("severity", FAULT) == FAULT for each in wanted) else 0)
