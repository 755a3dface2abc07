"""Every `tokenlake ...` line of the pages and launch files is a command that exists, with arguments that it takes."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tokenlake.api.cli import _parser
from tokenlake.store.lake import OwnedLake

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
PROGRAM = re.compile(r"(?:^|[\s/])tokenlake\"? (?=[a-z])")


def commands_of(text: str) -> list[list[str]]:
    """The arguments of each command line; a shell's variables are the number 1, which any argument takes."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        match = PROGRAM.search(line)
        if match is None or line.lstrip().startswith("#"):
            continue
        rest = re.sub(r"\$\{?\w+(?:\[[^]]*\])?\}?", "1", line[match.end() :])
        words = shlex.split(rest, comments=True)
        ends = [at for at, word in enumerate(words) if word in ("|", "&", "&&", ";") or word.startswith(">")]
        found.append(words[: min(ends, default=len(words))])
    return found


def blocks(page: Path) -> str:
    return "\n".join(re.findall(r"^```(?:bash|sh)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))


LINES = [
    pytest.param(words, id=f"{path.name}: {' '.join(words)[:60]}")
    for path in [*PAGES, DEPLOY / "slurm.sh"]
    for words in commands_of(blocks(path) if path.suffix == ".md" else path.read_text())
]


@pytest.mark.parametrize("words", LINES)
def test_a_command_line_of_the_docs_is_one_that_the_parser_takes(words: list[str]) -> None:
    arguments, rest = _parser().parse_known_args(words)
    assert rest == [] or words[0] == "worker", f"unknown arguments {rest}"
    assert arguments.run


def test_the_lines_are_found() -> None:
    assert len(LINES) > 15
    assert commands_of("a/bin/tokenlake sql \\\n  --lake $LAKE 'SELECT 1' | cat") == [
        ["sql", "--lake", "1", "SELECT 1"]
    ]


def test_the_queries_of_the_lines_run(tmp_path: Path) -> None:
    with OwnedLake.open(tmp_path / "lake") as lake:
        queries = [words[-1] for (words,) in (line.values for line in LINES) if words[0] == "sql"]
        for query in queries:
            lake.sql(query).fetchall()
    assert len(queries) > 2


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_a_launch_script_is_a_shell_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.fixture
def launcher() -> ModuleType:
    pytest.importorskip("ray")
    spec = importlib.util.spec_from_file_location("ray_launch", DEPLOY / "ray_launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ray_launcher_starts_commands_that_the_parser_takes(launcher: ModuleType) -> None:
    given = launcher.parse(["--lake", "l", "--model", "m", "--workers", "2", "--", "--tensor-parallel-size", "8"])
    assert given.rest == ["--tensor-parallel-size", "8"]
    gate = launcher.gate_command(given, "http://n0:8001")
    arguments, rest = _parser().parse_known_args(gate[gate.index("serve") :])
    assert (arguments.upstream, arguments.capture, arguments.port, rest) == ("http://n0:8001", "worker", 8000, [])
