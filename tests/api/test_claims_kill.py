"""SIGKILL of trainer and service, again and again: no row is trained twice, and none is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tokenlake
from tests.finalize.conftest import Field, group
from tests.long import LONG

TOKEN = "a-control-token-for-this-test"
TRAINER = Path(__file__).with_name("claiming_trainer.py")
GROUPS = 8


class Process:
    """A process that says lines, and starts again after it was killed."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._command, self._environment = command, environment
        self.start()

    def start(self) -> None:
        self.running = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """The next line; empty once the process has ended."""
        assert self.running.stdout is not None
        return self.running.stdout.readline()

    def kill(self) -> None:
        self.running.send_signal(signal.SIGKILL)
        self.running.communicate()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    field = Field(tmp_path)
    field.publish(*(record for number in range(GROUPS) for record in group(f"g{number}", [1.0, None, 0.5])))
    field.lake.close()
    return field.path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        (0, 3),
        *(
            pytest.param(seed, 30, marks=pytest.mark.skipif(not LONG, reason="TOKENLAKE_TEST_LONG is not set"))
            for seed in range(1, 6)
        ),
    ],
)
def test_killed_anywhere_every_row_is_trained_exactly_once(
    published: Path, tmp_path: Path, seed: int, kills: int
) -> None:
    draw = random.Random(seed)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"TOKENLAKE_TOKEN": TOKEN, "XDG_STATE_HOME": str(tmp_path / "state")}
    serve = ["serve", "--lake", str(published), "--port", str(port)]
    service = Process([sys.executable, "-m", "tokenlake.api.cli", *serve], environment)
    assert service.line()
    file = tmp_path / "checkpoint.json"
    trainer = Process([sys.executable, str(TRAINER), f"http://127.0.0.1:{port}", TOKEN, str(file)], environment)
    killed = {"trainer": 0, "service": 0}
    try:
        while sum(killed.values()) < kills:
            lines = [trainer.line() for _ in range(draw.randint(1, 5))]
            victim = draw.choice(["trainer", "trainer", "service"])
            if not lines[-1] or victim == "trainer":
                trainer.kill()
                killed["trainer"] += 1
                trainer.start()
            else:
                service.kill()
                killed["service"] += 1
                service.start()
                assert service.line()
        while trainer.line():
            continue
        assert trainer.running.wait() == 0
    finally:
        trainer.kill()
        service.kill()
    done = json.loads(file.read_text())
    assert sorted(done["groups"]) == sorted(f"g{number}" for number in range(GROUPS))
    assert sorted(done["rows"]) == sorted(f"g{number}_g{index}" for number in range(GROUPS) for index in range(3))
    with tokenlake.open(published) as lake:
        assert lake.sql("SELECT state, count(*) FROM claims GROUP BY state").fetchall() == [("consumed", GROUPS)]
        assert lake.sql("SELECT * FROM audit_findings").fetchall() == []
