"""The rows of `make bench`: contenders do the same work, ratios say how much better ours is, each runs once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench import gate_lineage, history, opener, run
from bench.agents import play
from bench.answer import Found, answer
from bench.conversations import Conversation, around, conversations
from bench.measure import Sample
from bench.peers import PEERS, peer
from bench.plan import QUICK, Plan
from bench.table import HEAD, Contender, Figure, Row, lines, report
from bench.works import gate, group, opening
from tokenlake.api.serve import in_thread
from tokenlake.store.lake import OwnedLake

ROOT = Path(__file__).parents[2]


def _contender(name: str, *values: float) -> Contender:
    left = iter(values)
    return Contender(name=name, run=lambda: {"it": Sample(value=next(left), latencies=[0.001, 0.002])})


@pytest.mark.parametrize(("unit", "to_floor", "to_peer"), [("calls/s", 0.5, 4.0), ("ms", 2.0, 0.25)])
def test_a_ratio_above_one_says_that_ours_is_better(unit: str, to_floor: float, to_peer: float) -> None:
    ours, floor, peer = _contender("tokenlake", 4, 40), _contender("raw", 8, 80), _contender("Gym", 1, 10)
    row = Row(
        work="W1", what="w", unit=unit, ours=Figure(ours, "it"), floor=Figure(floor, "it"), peers=[Figure(peer, "it")]
    )
    told = report(row, {each: [each.run(), each.run()] for each in (ours, floor, peer)})
    assert (told["floor"]["ratio"], told["peers"][0]["ratio"]) == (to_floor, to_peer)
    assert (told["ours"]["value"], told["ours"]["p50_ms"]) == (22.0, 2.0)
    (line,) = lines(told)
    assert line.split()[3:] == ["22", "2.00", "2.00", "44", "raw", f"{to_floor:.3g}x", "5.5", "Gym", f"{to_peer:.3g}x"]


def test_every_further_peer_has_a_line_of_its_own_below_the_first() -> None:
    ours, floor, *peers = (_contender(name, 4.0) for name in ("tokenlake", "raw", "NeMo-Gym", "Lance", "TransferQueue"))
    row = Row(
        work="W1",
        what="w",
        unit="ms",
        ours=Figure(ours, "it"),
        floor=Figure(floor, "it"),
        peers=[Figure(each, "it") for each in peers],
    )
    found = list(lines(report(row, {each: [each.run()] for each in (ours, floor, *peers)})))
    assert [line.split()[-3:] for line in found] == [["4", each.name, "1x"] for each in peers]
    assert {line.index(each.name) for line, each in zip(found, peers, strict=True)} == {HEAD.index("peer") + 5}


def test_a_contender_of_several_rows_runs_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = count(1)
    both = Contender(name="both", run=lambda: {"a": Sample(value=next(runs)), "b": Sample(value=1.0)})
    rows = [Row(work="W4", what=each, unit="s", ours=Figure(both, each), floor=Figure(both, "b")) for each in "ab"]

    @dataclass
    class Work:
        def rows(self, plan: Plan) -> list[Row]:
            return rows

    monkeypatch.setattr(run.importlib, "import_module", lambda _: Work())
    first, second = run.measured("W4", replace(QUICK, rounds=3), 1, None, {})
    assert (first["ours"]["rounds"], second["ours"]["rounds"]) == ([1, 2, 3], [1, 1, 1])


def test_every_work_is_a_module() -> None:
    assert all(find_spec(name) is not None for name in run.WORKS.values())


def test_a_conversation_grows_by_an_answer_and_a_question(tmp_path: Path) -> None:
    said, again = (conversations(3, turns=4, seed=5)[2] for _ in range(2))
    assert said == again != conversations(3, turns=4, seed=6)[2]
    for turn in range(4):
        assert said.request(turn + 1)[:-2] == said.request(turn)
        assert said.request(turn + 1)[-2] == {"role": "assistant", "content": said.answers[turn]}


def test_the_gate_and_a_history_hash_resolve_every_request(tmp_path: Path) -> None:
    work = conversations(3, turns=4, seed=1)
    ours = gate_lineage.play(tmp_path / "lake", work, 4)
    for seconds in (ours, history.play(tmp_path, work, 4)):
        assert [len(each) for each in (seconds.record, seconds.resolve, seconds.look_up)] == [12] * 3


def test_a_turn_is_found_among_calls_that_were_made_turn_by_turn() -> None:
    turns = [float(turn) for turn in range(1, 6) for _ in range(3)]
    assert around(turns, 4, 3) == [3.0] * 3 + [4.0] * 3 + [5.0] * 3
    assert around(turns, 5, 3) == [4.0] * 3 + [5.0] * 3


class _Forgetful(Conversation):
    """Sends another first answer back than it was given."""

    def request(self, turn: int) -> list[dict[str, Any]]:
        messages = super().request(turn)
        return [{**each, "content": "?"} if at == 2 else each for at, each in enumerate(messages)]


def test_a_request_that_is_resolved_to_another_call_ends_the_run(tmp_path: Path) -> None:
    said = conversations(1, turns=2, seed=1)[0]
    wrong = [
        _Forgetful(
            rollout_id=said.rollout_id,
            group_id=said.group_id,
            opening=said.opening,
            answers=said.answers,
            questions=said.questions,
        )
    ]
    with pytest.raises(AssertionError, match="is resolved to None"):
        gate_lineage.play(tmp_path / "lake", wrong, 2)


def test_a_group_is_published_as_numpy_has_it_or_nothing_is_measured(tmp_path: Path) -> None:
    with OwnedLake.open(tmp_path) as owned:
        lake = group._Lake(owned, before=1, seed=1, calls=2, delta=8)
        lake.check()
        assert len(lake.publish(1)) == 1
        with pytest.raises(AssertionError, match="8 rows are of no rollout"):
            lake.check()


def test_a_lake_sqlite_and_pyarrow_give_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = opening._fill(tmp_path / "lake", 200, 1)
    opening._copy(tmp_path / "lake", tmp_path / "rows.db")
    for kind, path in (("lake", "lake"), ("sqlite", "rows.db"), ("pyarrow", "lake")):
        opener.main([kind, str(tmp_path / path), *groups])
    opener.main(["sqlite", str(tmp_path / "rows.db"), *reversed(groups)])
    *same, other = (json.loads(line)["rows"] for line in capsys.readouterr().out.splitlines())
    assert len(groups) == 2
    assert len(set(same)) == 1
    assert other not in same


def test_the_plain_route_writes_every_body_and_answers_as_the_gate_does(tmp_path: Path) -> None:
    route = gate._Plain(tmp_path / "bodies")
    with in_thread(route.app()) as (url, _):
        played = play([(name, f"{url}/ng-rollout/{name}/v1", "k") for name in "ab"], 2, 2)
    route.close()
    assert len(route.handled) == len(played.latencies) == 4
    assert [len(calls) for calls in played.calls] == [2, 2]
    assert (tmp_path / "bodies").read_bytes().count(b'"messages"') == 4


def test_a_peer_is_named_with_the_interpreter_of_its_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.parsed([]).peers == {}
    found = run.parsed(["--peer", "lance=.bench/lance/bin/python", "--peer", "nemo-gym=/py", "--only", "W1,W2"])
    assert found.peers == {"lance": Path(".bench/lance/bin/python"), "nemo-gym": Path("/py")}
    assert found.works == ["W1", "W2"]
    for wrong in ("lance", "lance=", "parquet=/py"):
        with pytest.raises(SystemExit):
            run.parsed(["--peer", wrong])
        assert f"'{wrong}' is no peer: there are {', '.join(PEERS)}" in capsys.readouterr().err


def test_make_bench_sets_up_every_documented_peer_and_by_default_nemo_gym_alone() -> None:
    text = (ROOT / "Makefile").read_text()
    assert re.findall(r"^STAMP_(\S+) :=", text, re.MULTILINE) == list(PEERS)
    assert re.findall(r"^PEERS \?= (.*)", text, re.MULTILINE) == ["nemo-gym"]
    assert all(find_spec(module) is not None for _, module in PEERS.values())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [name for name in PEERS if f"\n| `{name}` |" not in page] == []
    command = ["make", "--dry-run", "--no-print-directory", "bench", "PEERS=lance transferqueue", "ARGS=--quick"]
    *_, last = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    named = [argument for argument in last.split() if "=" in argument]
    assert named == [f"{name}=.bench/{name}/bin/python" for name in ("lance", "transferqueue")]


def test_a_figure_of_a_peer_is_what_its_process_answers_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stage(seed: int, spec: Sequence[int], folder: Path) -> Found:
        return {"stage": Sample(value=float(seed), latencies=[0.5, *map(float, spec)])}

    monkeypatch.setattr(sys, "argv", ["peer", "stage", "7", "2", "3", str(tmp_path)])
    answer(stage)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho noise\necho "$@" >{tmp_path}/asked\ncat <<end\n{capsys.readouterr().out}end\n')
    python.chmod(0o700)
    with ExitStack() as held:
        plan = Plan(size=QUICK, seed=7, scratch=tmp_path, held=held, peers={"lance": python})
        (figure,) = peer(plan, "lance", "stage", 2, 3, label="Lance x2")("stage")
        assert figure.contender.name == "Lance x2"
        assert figure.contender.run()["stage"] == Sample(value=7.0, latencies=[0.5, 2.0, 3.0])
    assert (tmp_path / "asked").read_text().startswith("-m bench.lance_peer stage 7 2 3 /")


def test_without_its_environment_a_peer_is_left_out(tmp_path: Path) -> None:
    with ExitStack() as held:
        plan = Plan(size=QUICK, seed=1, scratch=tmp_path, held=held)
        assert peer(plan, "nemo-gym", "ledger", 1, 1)("record") == ()
