"""The short form of `make crash`: one fault of each kind, another life of the process each time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_and_nothing_else_is_half_there(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.runner", "--short"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout
