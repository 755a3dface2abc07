"""Workers over the embedded engine as actors of a local Ray, behind a real gate."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import Opener, opener
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tokenlake.errors import ConfigError, Conflict

ray = pytest.importorskip("ray")
pytest.importorskip("torch")
from tokenlake.ingest.ray_workers import WorkerFleet  # noqa: E402  # needs Ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Ray leaves sockets and files to the garbage collector, and warns of its own future.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
ASKED = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def open_gate(tmp_path: Path) -> Opener:
    return opener(tmp_path)


@pytest.mark.usefixtures("cluster")
def test_a_fleet_captures_is_labelled_at_once_and_ends_with_its_actors(tmp_path: Path, open_gate: Opener) -> None:
    with WorkerFleet(tmp_path / "lake", workers=2, arguments=["--engine", "tiny"], key="k", deadline_s=60) as fleet:
        at = fleet.addresses()
        assert sorted(at) == ["worker-0", "worker-1"]
        assert fleet.weight_versions() == {"worker-0": None, "worker-1": None}
        assert fleet.set_weight_version(4) == {"worker-0": 4, "worker-1": 4}
        with pytest.raises(Conflict):
            fleet.set_weight_version(3)
        with open_gate(engine=backend(at["worker-0"], "worker")) as door:
            assert door.request("PUT", "/api/v1/workers/worker-1", {"url": at["worker-1"]}).is_success
            said = door.client.set_weight_version(4)["workers"]
            assert [(entry["worker_id"], entry["loaded_weight_version"]) for entry in said] == [
                ("worker-0", 4),
                ("worker-1", 4),
            ]
            rollouts = door.register(n=6)
            for rollout in rollouts:
                agent = door.agent(rollout).chat.completions
                first = agent.create(model="m", messages=ASKED, max_tokens=9, temperature=0)
                told = [*ASKED, first.choices[0].message.model_dump(exclude_none=True), *ASKED]
                whole = "".join(
                    chunk.choices[0].delta.content or ""
                    for chunk in agent.create(model="m", messages=told, max_tokens=9, temperature=0, stream=True)
                )
                assert whole
                door.client.seal(rollout["rollout_id"], reward=1.0)
            events = door.events("call_committed")
            assert {event["writer"] for event in events} == {"worker-0", "worker-1"}
            assert [event["mode"] for event in events] == ["text", "token_in"] * 6
            assert {event["weight_version"] for event in events} == {4}
            wait_for(door, lambda: door.service.control.groups["g"].state == "published")
            assert door.request("GET", "/api/v1/audit").json()["healthy"]
            hosted = hosted_processes(tmp_path / "lake")
            assert len(hosted) == 2
    wait_gone(hosted)


@pytest.mark.usefixtures("cluster")
def test_a_worker_that_does_not_come_up_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not come up"):
        WorkerFleet(tmp_path / "lake", workers=1, arguments=["--engine", "none"], deadline_s=60)


def hosted_processes(lake: Path) -> list[int]:
    """The workers over a lake: by their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--with-parent" in command and str(lake).encode() in command and command[0] != b"/bin/sh":
            found.append(int(folder.name))
    return found


def wait_gone(processes: list[int]) -> None:
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], 60)[0], "it ends with its actor"
        os.close(descriptor)
