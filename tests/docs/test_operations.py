"""The runbook knows every reason that a row can be masked for, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tokenlake.store.schema import PLACEHOLDER_REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_every_reason_of_a_placeholder_is_explained_once() -> None:
    (section,) = re.findall(r"## When a row is masked\n(.*?)\n## ", PAGE.read_text(), re.DOTALL)
    cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(PLACEHOLDER_REASONS)
