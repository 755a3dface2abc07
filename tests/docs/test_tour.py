"""The tour runs as it stands, against the embedded engine, and prints what it says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tour.md"


def test_the_tour_says_what_happens(tmp_path: Path) -> None:
    tiny = pytest.importorskip("tokenlake.ingest.tiny")
    from tokenlake.api.serve import embedded
    from tokenlake.api.service import Service
    from tokenlake.api.settings import Environment, Settings
    from tokenlake.store.lake import OwnedLake

    environment = Environment(token="t", token_given=True, capability_key=None, state_dir=tmp_path / "state")
    text = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE.read_text(), re.DOTALL))
    with OwnedLake.open(tmp_path / "lake") as lake:
        service = Service(lake, tiny.TinyEngine(), Settings(), environment)
        with embedded(service) as running:
            names = {"url": running.url, "token": "t", "lake_path": str(tmp_path / "lake")}
            example = doctest.DocTestParser().get_doctest(text, names, "tour", str(PAGE), 0)
            said: list[str] = []
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
            done = runner.run(example, out=said.append)
    assert done.attempted > 30
    assert done.failed == 0, "".join(said)
