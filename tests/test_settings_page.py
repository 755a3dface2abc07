"""`docs/settings.md` has a line for every setting, policy and environment variable, with what the code says of it.

`python -m tests.test_settings_page` writes the two tables anew.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenlake.api import settings
from tokenlake.store.policy import POLICIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def default(value: Any) -> str:
    return "none" if value is None or value == () else str(value)


def line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def settings_lines() -> list[str]:
    return [
        line(f"`{s.name}`", default(s.default), s.metadata["unit"], s.metadata["owner"], s.metadata["sentence"])
        for s in fields(settings.Settings)
    ]


def policy_lines() -> list[str]:
    return [line(f"`{p.name}`", default(p.default), p.unit, p.owner, p.sentence) for p in POLICIES.values()]


def test_every_setting_and_policy_stands_on_the_page_as_the_code_has_it() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line for line in settings_lines() + policy_lines() if line not in lines] == []


def test_the_page_names_no_setting_that_does_not_exist() -> None:
    named = re.findall(r"^\| `([a-z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(named) == sorted([item.name for item in fields(settings.Settings)] + list(POLICIES))


def test_every_environment_variable_stands_on_the_page() -> None:
    read = re.findall(r'environ\.get\("([A-Z_]+)"\)', Path(settings.__file__).read_text())
    assert read
    assert [name for name in read if f"`{name}`" not in PAGE.read_text()] == []


def write() -> None:
    """Replace the rows of both tables."""
    page = re.sub(r"(?m)^\| `[a-z_]+` \|.*\n", "", PAGE.read_text())
    head = "| name | default | unit | owner | does |\n|---|---|---|---|---|\n"
    for rows in (settings_lines(), policy_lines()):
        page = page.replace(head, head.replace("---|\n", "--- |\n") + "\n".join(rows) + "\n", 1)
    PAGE.write_text(page.replace("--- |\n", "---|\n"))


if __name__ == "__main__":
    write()
