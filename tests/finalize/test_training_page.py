"""The examples of `docs/training.md` run, in their order, against a lake and a service over it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_engine import ScriptedEngine
from tests.finalize.conftest import Field, group
from tokenlake import open as open_lake
from tokenlake.api.client import Client
from tokenlake.api.serve import embedded
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment, Settings
from tokenlake.finalize import RowLoader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def test_the_examples_run(field: Field, tmp_path: Path) -> None:
    field.publish(*group("g1", [1.0, None, 0.5, 0.0]), *group("g2", [1.0, 0.0, 0.5, 0.0]))
    environment = Environment(token="t", token_given=True, capability_key=None, state_dir=tmp_path / "state")
    service = Service(field.lake, ScriptedEngine(), Settings(), environment)  # type: ignore[arg-type]
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) >= 4
    with embedded(service) as running, Client(running.url, "t") as client, open_lake(field.path) as lake:
        names: dict[str, Any] = {"client": client, "lake": lake, "path": field.path, "RowLoader": RowLoader}
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
    assert names["groups"] == ["g1", "g2"]
    assert names["worth"].tolist() == pytest.approx(
        [1.0, 0.0, 0.0, -1.0, *[(r - 0.375) / 0.4787135539 for r in (1.0, 0.0, 0.5, 0.0)]]
    )
    assert int(names["step"].mask.sum()) == int(names["tokens"])
