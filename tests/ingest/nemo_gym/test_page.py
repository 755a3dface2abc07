"""The examples of docs/nemo_gym.md run, one after the other."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "nemo_gym.md").read_text()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nemo_gym.token_id_capture")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    exec(compile("".join(blocks), "docs/nemo_gym.md", "exec"), {})


def test_the_classes_that_the_page_names_are_there() -> None:
    pytest.importorskip("nemo_gym.token_id_capture")
    named = set(re.findall(r"tokenlake\.ingest\.nemo_gym\.(\w+)[.:](\w+)", PAGE))
    assert len(named) == 5
    for module, name in named:
        assert hasattr(import_module(f"tokenlake.ingest.nemo_gym.{module}"), name)
