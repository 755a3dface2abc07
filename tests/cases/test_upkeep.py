"""Compact, gc and backup as an operator meets them, over a lake with published groups."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import tokenlake
from tests.cases.conftest import CaseLake, call, fail, group, seal
from tokenlake.errors import ConfigError
from tokenlake.store import intake
from tokenlake.store.backup import back_up
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import lineage_loss
from tokenlake.store.reader import Lake
from tokenlake.store.retention import Retention, retire

ROWS = "SELECT sample_id, input_ids, reason, row_digest FROM ready_rows ORDER BY sample_id"
FAULTS = "SELECT kind, rollout_id FROM audit_findings WHERE severity = 'fault'"


@pytest.fixture
def filled(case: CaseLake) -> CaseLake:
    """Two published groups of two weight versions and one open group."""
    for name, version in (("old", 3), ("new", 9)):
        case.take(
            group(name, 2),
            call(f"{name}_g0", "c0", [1, 2], [3, 4], weight_version=version),
            call(f"{name}_g0", "c1", [1, 2, 3, 4, 5], [6], weight_version=version),
            seal(f"{name}_g0", 1.0, terminal_call_id="c1"),
            call(f"{name}_g1", "c0", [1, 2], [7], weight_version=version),
            seal(f"{name}_g1", 0.0, terminal_call_id="c0"),
        )
    case.take(group("open", 1), call("open_g0", "c0", [1], [2]))
    case.finalize()
    return case


def run(case: CaseLake, *arguments: str) -> str:
    status, out, err = case.run(*arguments, "--lake", str(case.path))
    assert status == 0, err
    return out


def deltas(case: CaseLake) -> list[Any]:
    return [name for (name,) in case.sql("SELECT DISTINCT group_id FROM deltas ORDER BY 1")]


def test_compact_changes_no_row_and_no_finding(filled: CaseLake) -> None:
    before = filled.sql(ROWS)
    assert "7 records kept, 0 removed" in run(filled, "compact")
    assert "0 segments became 0" in run(filled, "compact")
    assert filled.sql(ROWS) == before
    assert filled.sql(FAULTS) == []
    assert filled.sql("SELECT count(*) FROM call_verdicts WHERE reason IS NULL") == [(7,)]


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--below-version", "9"], ["new", "open"]),
        (["--below-version", "10"], ["open"]),
        (["--older-than", "0"], ["open"]),
        (["--older-than", "3600"], ["new", "old", "open"]),
        (["--older-than", "0", "--below-version", "9"], ["new", "open"]),
        (["--consumed"], ["new", "old", "open"]),
        (["--group", "new"], ["old", "open"]),
    ],
)
def test_gc_removes_deltas_and_keeps_rows_and_the_trail(
    filled: CaseLake, arguments: list[str], left: list[str]
) -> None:
    before = filled.sql(ROWS)
    events = filled.sql("SELECT count(*) FROM lineage WHERE event_type = 'call_committed'")
    run(filled, "gc", *arguments)
    assert deltas(filled) == left
    assert filled.sql(ROWS) == before
    assert filled.sql(FAULTS) == []
    assert filled.sql("SELECT count(*) FROM lineage WHERE event_type = 'call_committed'") == events
    gone = {"old", "new", "open"} - set(left)
    assert {name for (name,) in filled.sql("SELECT group_id FROM retirements WHERE whole")} == gone
    assert "retired 0 groups" in run(filled, "gc", *arguments)


def test_any_age_is_a_rule_and_a_retired_event_says_by_which(filled: CaseLake) -> None:
    with OwnedLake.open(filled.path) as lake:
        for age in (math.nan, math.inf, -1.0):
            with pytest.raises(ConfigError, match="an age is a number of seconds"):
                retire(lake, Retention(older_than_s=age))
        assert retire(lake, Retention(older_than_s=1e308, below_version=2**62)).groups == ()
        assert retire(lake, Retention(older_than_s=0.0)).groups == ("new", "old")
    assert filled.sql("SELECT DISTINCT detail FROM lineage WHERE event_type = 'retired'") == [
        ('{"older_than_s": 0.0}',)
    ]


def test_gc_of_what_was_consumed_spares_what_was_given_back(filled: CaseLake) -> None:
    with OwnedLake.open(filled.path) as lake:
        for name, last in (("old", "rows_consumed"), ("new", "rows_released")):
            for kind in ("rows_claimed", last):
                lake.lineage.append(kind, group_id=name, consumer="t0", claim_id=f"c-{name}")
        assert retire(lake, Retention(consumed=True)).groups == ("old",)
    assert deltas(filled) == ["new", "open"]


def test_gc_of_one_rollout_leaves_its_siblings(filled: CaseLake) -> None:
    run(filled, "gc", "--rollout", "old_g0")
    assert filled.sql("SELECT rollout_id FROM deltas WHERE group_id = 'old'") == [("old_g1",)]
    assert filled.sql(FAULTS) == []
    assert filled.sql("SELECT check_name FROM call_checks WHERE NOT ok") == [("not_retired",)] * 2


def test_a_file_whose_groups_are_retired_is_imported_again_and_changes_nothing(
    filled: CaseLake, tmp_path: Path
) -> None:
    first = call("old_g0", "c0", [1, 2], [3, 4], weight_version=3)
    second = call("old_g0", "c1", [1, 2, 3, 4, 5], [6], weight_version=3)
    alone = call("old_g1", "c0", [1, 2], [7], weight_version=3)
    run(filled, "gc", "--group", "old")
    file = tmp_path / "again.jsonl"

    def again(*records: dict[str, Any]) -> tuple[int, str]:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        status, out, err = filled.run("import", "--lake", str(filled.path), str(file))
        return status, out + err

    end = seal("old_g0", 1.0, terminal_call_id="c1")
    assert (
        "0 calls, 0 seals, 0 fails; 5 records were there already"
        in (again(group("old", 2), first, second, end, alone)[1])
    )
    for records, why in (
        ([first, {**second, "generation_token_ids": [7]}], "exists with other content"),
        ([first, call("old_g0", "c2", [1, 2, 3, 4, 8], [9])], "old_g0 is retired: it takes no new call"),
        ([{**second, "parent_call_id": "c0"}], "call c0 of old_g0 is retired"),
    ):
        status, said = again(*records)
        assert (status, why in said) == (2, True), said
    assert deltas(filled) == ["new", "open"]


@pytest.mark.parametrize("opened", ["before", "while"])
def test_a_reader_that_takes_in_while_gc_runs_knows_why_a_delta_is_gone(
    filled: CaseLake, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look at lineage comes before the `retired` events, its look at the deltas after they were removed."""
    real: Any = vars(intake)["_Intake"].lineage
    looks: list[int] = []

    def lineage(self: Any) -> None:
        real(self)
        looks.append(len(looks))
        if len(looks) == 1:
            run(filled, "gc", "--group", "old")

    reader = Lake(filled.path) if opened == "before" else None
    with monkeypatch.context() as patched:
        patched.setattr("tokenlake.store.intake._Intake.lineage", lineage)
        if reader is None:
            reader = Lake(filled.path)
        else:
            reader.refresh()
    with reader:
        assert looks
        assert reader.sql(FAULTS).fetchall() == []
        assert reader.sql("SELECT group_id FROM retirements WHERE whole").fetchall() == [("old",)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "without a condition"),
        (["--group", "open"], "still open"),
        (["--group", "nope"], "no group nope"),
        (["--rollout", "nope_g0"], "no group nope"),
        (["--rollout", "old_g2"], "has no rollout old_g2"),
        (["--group", "old", "--consumed"], "not both"),
        (["--older-than", "-1"], "at least 0"),
        (["--older-than", "nan"], "at least 0"),
        (["--older-than", "inf"], "at least 0"),
        (["--below-version", "-1"], "at least 0"),
    ],
)
def test_gc_refuses_in_one_line(filled: CaseLake, arguments: list[str], why: str) -> None:
    status, out, err = filled.run("gc", *arguments, "--lake", str(filled.path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert why in err
    assert deltas(filled) == ["new", "old", "open"]


def test_compact_and_gc_refuse_while_another_process_owns_the_lake(filled: CaseLake) -> None:
    with OwnedLake.open(filled.path):
        for command in (["compact"], ["gc", "--older-than", "0"]):
            done = subprocess.run(
                [sys.executable, "-m", "tokenlake.api.cli", *command, "--lake", str(filled.path)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert "is owned by process" in done.stderr


def test_a_backup_of_a_live_lake_is_a_lake(filled: CaseLake, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    before = filled.sql(ROWS)
    with OwnedLake.open(filled.path):
        assert "copied" in run(filled, "backup", str(target))
    with tokenlake.open(target) as copy:
        assert copy.sql(ROWS).fetchall() == before
        assert copy.sql(FAULTS).fetchall() == []
    with OwnedLake.open(target) as copy:
        assert copy.sql(ROWS).fetchall() == before
    status, _, err = filled.run("backup", "--lake", str(filled.path), str(target))
    assert (status, "exists" in err) == (2, True)


@pytest.mark.parametrize("place", [(), ("rows",), ("deltas", "copy")])
def test_a_backup_into_the_lake_itself_is_refused(filled: CaseLake, place: tuple[str, ...]) -> None:
    before = sorted(filled.path.rglob("*"))
    status, _, err = filled.run("backup", "--lake", str(filled.path), str(filled.path.joinpath(*place, "copy")))
    assert (status, "inside the lake" in err) == (2, True)
    assert sorted(filled.path.rglob("*")) == before


def test_a_backup_whose_folder_is_not_there_leaves_nothing_to_remove(filled: CaseLake, tmp_path: Path) -> None:
    status, _, err = filled.run("backup", "--lake", str(filled.path), str(tmp_path / "nowhere" / "copy"))
    assert (status, "remove it" in err) == (2, False)


def test_a_backup_made_while_events_are_written_holds_what_each_event_names(tmp_path: Path) -> None:
    with OwnedLake.open(tmp_path / "lake", segment_max_bytes=60_000) as lake:
        stop = threading.Event()

        def write() -> None:
            n = 0
            while not stop.is_set():
                lake.write_rows(_row(n))
                lake.lineage.append("group_published", group_id=f"g{n}", segment=n, n=1)
                lake.lineage.anchor()
                n += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for i in range(5):
                back_up(lake.path, tmp_path / f"copy{i}")
        finally:
            stop.set()
            thread.join()
    for i in range(5):
        assert lineage_loss(tmp_path / f"copy{i}") == []
        with tokenlake.open(tmp_path / f"copy{i}") as copy:
            missing = "SELECT count(*) FROM lineage WHERE segment NOT IN (SELECT segment FROM rows)"
            assert copy.sql(missing).fetchall() == [(0,)]


def _row(n: int) -> Any:
    from tests.store.test_lake import row_table

    return row_table(f"g{n}", n=1)


def test_a_failed_rollout_has_nothing_to_retire(case: CaseLake) -> None:
    case.take(group("g", 1), fail("g_g0"))
    case.finalize()
    assert "retired 1 groups" in run(case, "gc", "--older-than", "0")
    assert case.sql(FAULTS) == []


def test_an_audit_looks_at_the_rows_that_retention_left(filled: CaseLake) -> None:
    filled.run("finalize", "--lake", str(filled.path), "--policy", "group_deadline_s=0")
    run(filled, "gc", "--older-than", "0")
    assert deltas(filled) == []
    found = json.loads(run(filled, "audit", "--summary"))
    assert (found["groups"], found["calls"], found["rows"], found["faults"]) == (3, 0, 5, 0)
    assert filled.run("audit", "--lake", str(filled.path), "--expect", found["digest"])[0] == 0
