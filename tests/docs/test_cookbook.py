"""Every query of the cookbook runs, says what is so of a lake made by hand, and what the page shows of the demo's."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

import tokenlake
from tests.cases.conftest import CaseLake, call, fail, group, seal
from tokenlake.api.output import write_table

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
DEMO = Path(__file__).parents[1] / "golden" / "v1" / "demo.tar.xz"
"""A lake that `make demo` left, compacted, without its index: format 1, to be read for ever."""
QUERIES: dict[str, str] = dict(re.findall(r"## ([^\n]*)\n.*?```sql\n(.*?)\n```", PAGE.read_text(), re.DOTALL))

EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "Which tasks give no signal?": [("same", 2, 1.0)],
    "Why are rows placeholders?": [("environment_failed", 1)],
    "How much of what was sampled is trained on?": [(6, 1, 0.857)],
    "Which rows mix weight versions?": [("mixed_g0", 7, 8)],
    "How many tokens does a turn cost?": [(0, 4, 1, 2), (1, 1, 1, 1)],
    "Are prompts duplicated?": [(["mixed", "same"],)],
    "Are whole rows duplicated?": [("same", 2, "same_g0")],
    "Which rollouts were cut off?": [],
    "Which conversations fork?": [("mixed_g0", "a", 2)],
    "Which calls failed?": [],
    "What was retried?": [],
    "Is anything damaged?": [],
}


@pytest.fixture
def lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CaseLake:
    case = CaseLake(tmp_path / "lake", capsys)
    case.take(
        group("same", 2),
        *(line for i in range(2) for line in (call(f"same_g{i}", "a", [1, 2], [3]), seal(f"same_g{i}", 1.0))),
        group("mixed", 3),
        call("mixed_g0", "a", [1, 2], [3]),
        call("mixed_g0", "b", [1, 2, 3, 4], [5], weight_version=8),
        call("mixed_g0", "dead", [1, 2, 3, 9], [9]),
        seal("mixed_g0", 0.0, terminal_call_id="b"),
        call("mixed_g1", "a", [1, 2], [6, 7]),
        seal("mixed_g1", 1.0),
        fail("mixed_g2"),
    )
    case.finalize()
    return case


def test_there_are_twenty_questions() -> None:
    assert len(QUERIES) == 20
    assert set(EXPECTED) <= set(QUERIES)


def test_every_query_runs_and_says_what_is_so(lake: CaseLake) -> None:
    opened = tokenlake.open(lake.path)
    try:
        for title, query in QUERIES.items():
            rows = [tuple(row.values()) for row in opened.fetch(query).to_pylist()]
            if title in EXPECTED:
                assert rows == EXPECTED[title], title
    finally:
        opened.close()


def test_every_query_says_of_the_demos_lake_what_the_page_shows(tmp_path: Path) -> None:
    shown = re.findall(r"```sql\n(.*?)\n```\n\n```text\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert [query for query, _ in shown] == list(QUERIES.values())
    with tarfile.open(DEMO) as packed:
        packed.extractall(tmp_path, filter="data")
    lake = tokenlake.open(tmp_path)
    try:
        for query, text in shown:
            out = io.BytesIO()
            write_table(lake.fetch(query), "table", out)
            start, _, end = text.partition("\n...\n")
            said = out.getvalue().decode().rstrip("\n")
            assert said.startswith(start), query
            assert said.endswith(end or start), query
    finally:
        lake.close()
