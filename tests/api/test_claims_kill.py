"""SIGKILL of trainer, service and Ray actors, again and again: no row is trained twice, and none is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenlake
from tests.finalize.conftest import Field, group
from tests.long import ONLY_LONG
from tokenlake.api.client import Client

TOKEN = "a-control-token-for-this-test"
TRAINER = Path(__file__).with_name("claiming_trainer.py")
NAMES = [f"g{number:02d}" for number in range(8)]


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
def lake(tmp_path: Path) -> Path:
    """Groups that have ended; those of even number are published."""
    field = Field(tmp_path)
    for name in NAMES[::2]:
        field.publish(*group(name, [1.0, None, 0.5]))
    field.add(*(record for name in NAMES[1::2] for record in group(name, [1.0, None, 0.5])))
    field.lake.close()
    return field.path


@pytest.fixture
def raylet() -> Iterator[Any]:
    """The process id of a local Ray's raylet, whose address is in the environment."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster.head_node.all_processes["raylet"][0].process.pid
    cluster.shutdown()


def finalizers(raylet: int) -> list[int]:
    """Process ids of the actors that judge groups, of this Ray and no other."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet and (folder / "cmdline").read_bytes().startswith(b"ray::Finalizer"):
                found.append(int(folder.name))
    return found


def trained(file: Path) -> int:
    """How many groups are in the trainer's checkpoint."""
    return len(json.loads(file.read_text())["groups"]) if file.exists() else 0


def kill_at_random(lake: Path, folder: Path, seed: int, kills: int, raylet: int | None = None) -> Counter[str]:
    """Train on every group of the lake, and on one more for every other kill, and look at what was trained."""
    draw = random.Random(seed)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"TOKENLAKE_TOKEN": TOKEN, "XDG_STATE_HOME": str(folder / "state")}
    judged = [] if raylet is None else ["--set", "finalizer_actors=2"]
    serve = ["serve", "--lake", str(lake), "--port", str(port), *judged]
    service = Process([sys.executable, "-m", "tokenlake.api.cli", *serve], environment)
    assert service.line()
    file, names = folder / "checkpoint.json", [*NAMES, *(f"late{number}" for number in range(kills // 2))]
    trainer = Process([sys.executable, str(TRAINER), url, TOKEN, str(file), str(len(names))], environment)
    killed: Counter[str] = Counter()
    late = iter(names[len(NAMES) :])
    try:
        with Client(url, TOKEN, retry_s=60, deadline_s=120) as client:
            while killed.total() < kills:
                for _ in range(draw.randint(1, 5)):
                    trainer.line()
                if draw.random() < 0.4 and trained(file) < len(NAMES) + killed.total() // 2:
                    while trainer.line() not in ("consumed\n", ""):
                        continue
                actors = [] if raylet is None else finalizers(raylet)
                victim = draw.choice(["trainer", "service", *(["actor"] if actors else [])])
                if victim == "actor":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(draw.choice(actors), signal.SIGKILL)
                else:
                    (trainer if victim == "trainer" else service).kill()
                    (trainer if victim == "trainer" else service).start()
                    assert victim == "trainer" or service.line()
                killed[victim] += 1
                if killed.total() % 2 == 0:
                    registered = client.register_group(name := next(late), 3, idempotency_key=name)
                    for slot in registered["rollouts"]:
                        client.fail(slot["rollout_id"], reason="environment_failed")
        while trainer.line():
            continue
        assert trainer.running.wait() == 0
    finally:
        trainer.kill()
        service.kill()
    done = json.loads(file.read_text())
    assert sorted(done["groups"]) == sorted(names)
    assert sorted(done["rows"]) == sorted(f"{name}_g{index}" for name in names for index in range(3))
    with tokenlake.open(lake) as opened:
        assert opened.sql("SELECT state, count(*) FROM claims GROUP BY state").fetchall() == [("consumed", len(names))]
        assert opened.sql("SELECT * FROM audit_findings").fetchall() == []
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "kills"), [(3, 3), *(pytest.param(seed, 30, marks=ONLY_LONG) for seed in range(1, 6))]
)
def test_killed_anywhere_every_row_is_trained_exactly_once(lake: Path, tmp_path: Path, seed: int, kills: int) -> None:
    killed = kill_at_random(lake, tmp_path, seed, kills)
    assert killed.keys() == {"trainer", "service"}


@pytest.mark.slow
@pytest.mark.ray
@ONLY_LONG
def test_the_same_with_finalizers_in_ray_that_are_killed_too(lake: Path, tmp_path: Path, raylet: int) -> None:
    killed = kill_at_random(lake, tmp_path, 0, 50, raylet)
    assert killed.keys() == {"trainer", "service", "actor"}
