"""`inspect` on a terminal and off it, and `diff` of two lakes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import CaseLake, call, fail, group, seal
from tokenlake.api import cli


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def filled(case: CaseLake) -> CaseLake:
    case.take(
        group("g", 2),
        call("g_g0", "c0", [71, 72], [73, 74], generation_logprobs=[-0.001, -5.0]),
        call("g_g0", "fork", [71, 72, 73, 74, 1], [75]),
        call("g_g0", "c1", [71, 72, 73, 74, 2], [76], weight_version=8),
        seal("g_g0", 1.0, terminal_call_id="c1"),
        fail("g_g1"),
    )
    case.finalize()
    return case


def test_inspect_shows_tree_versions_and_tokens_without_colour(filled: CaseLake) -> None:
    status, out, _ = filled.run("inspect", "--lake", str(filled.path), "g_g0", "--tokens", "5")
    assert status == 0
    assert "\x1b" not in out
    lines = out.splitlines()
    assert "weights   7..8" in lines
    tree = [line.partition("  text")[0].partition("  token_in")[0] for line in lines]
    start = tree.index("attempt 0: 3 calls (* leads to the terminal)")
    assert tree[start + 1 : start + 4] == ["  * c0", "  └─ - fork", "  * c1"]
    assert any(line.startswith("  * c1  token_in, 4+2=6 tokens") for line in lines)
    assert "  c0  71 72 73▇ 74▁" in lines
    assert "  c1  2" in lines


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_inspect_colours_a_terminal_unless_asked_not_to(
    filled: CaseLake, monkeypatch: pytest.MonkeyPatch, no_color: str, coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["inspect", "--lake", str(filled.path), "g_g0", "--tokens", "5"]) == 0
    assert ("\x1b[" in screen.getvalue()) is coloured


def compare(a: CaseLake, b: CaseLake, *more: str) -> tuple[int, list[dict[str, Any]]]:
    status, out, err = a.run("diff", str(a.path), str(b.path), "--format", "jsonl", *more)
    assert status in (0, 1), err
    return status, [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CaseLake:
    return CaseLake(tmp_path / "other", capsys)


def test_a_lake_is_the_same_as_itself(filled: CaseLake) -> None:
    assert compare(filled, filled) == (0, [])


def test_diff_says_where_rows_first_differ(filled: CaseLake, other: CaseLake) -> None:
    other.take(
        group("g", 2),
        call("g_g0", "c0", [71, 72], [73, 74], generation_logprobs=[-0.001, -5.5]),
        call("g_g0", "c1", [71, 72, 73, 74, 2], [77], weight_version=8),
        seal("g_g0", 0.5, terminal_call_id="c1"),
        fail("g_g1"),
        group("h", 1),
        fail("h_g0"),
    )
    other.finalize()
    status, found = compare(filled, other)
    assert status == 1
    said = {(each["row_a"], each["what"]): (each["position"], each["delta"]) for each in found}
    assert said == {
        ("g_g0", "reward"): (None, None),
        ("g_g0", "input_ids"): (5, None),
        ("g_g0", "logprobs"): (3, 0.5),
        (None, "missing"): (None, None),
    }
    status, found = compare(filled, other, "--group", "g", "--tolerance", "0.5")
    assert status == 1
    assert {each["what"] for each in found} == {"reward", "input_ids"}


def test_runs_with_other_ids_are_matched_by_their_prompts(filled: CaseLake, other: CaseLake) -> None:
    other.take(
        group("z", 1),
        call("z_g0", "c0", [99], [1]),
        seal("z_g0", 1.0),
        group("y", 2),
        call("y_g0", "d0", [71, 72], [73, 74], generation_logprobs=[-0.001, -5.0]),
        call("y_g0", "d1", [71, 72, 73, 74, 2], [76], weight_version=8),
        seal("y_g0", 1.0, terminal_call_id="d1"),
        fail("y_g1"),
    )
    other.finalize()
    status, found = compare(filled, other)
    assert status == 1
    assert [(each["row_a"], each["row_b"], each["what"]) for each in found] == [(None, "z_g0", "missing")]


def test_two_lakes_without_rows_are_not_called_the_same(case: CaseLake, other: CaseLake) -> None:
    for lake in (case, other):
        lake.take(group("g", 1))
    status, _, err = case.run("diff", str(case.path), str(other.path))
    assert status == 2
    assert "nothing to compare" in err
