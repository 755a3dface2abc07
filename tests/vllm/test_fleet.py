"""Workers over real vLLM as actors of a local Ray, behind a real gate: where the `ray` extra is installed as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import Opener
from tests.api.test_upstream import backend
from tests.vllm.conftest import FLAGS, PYTHON, WITHOUT_A_GPU
from tests.vllm.test_worker import exact, play
from tokenlake.errors import Conflict

ray = pytest.importorskip("ray")
from tests.ingest.test_ray_workers import hosted_processes, wait_gone  # noqa: E402  # needs Ray
from tokenlake.ingest.ray_workers import WorkerFleet  # noqa: E402  # needs Ray

pytestmark = [
    pytest.mark.ray,
    # Ray leaves sockets and files to the garbage collector, and warns of its own future.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

OWN = {"worker_niceness": 0}
"""Ray's processes, and with them the servers, would wait for everybody else on this machine."""


def descendants(processes: list[int]) -> list[int]:
    """What these have started, and what that has."""
    found: list[int] = []
    waiting = list(processes)
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            started = [*map(int, task.read_text().split())]
            found += started
            waiting += started
    return found


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000, _system_config=OWN
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_fleet_of_vllm_captures_and_is_labelled_at_once(tmp_path: Path, model: Path, opened: Opener) -> None:
    assert PYTHON is not None
    with WorkerFleet(
        tmp_path / "lake",
        workers=2,
        arguments=["--model", str(model), *FLAGS],
        options={"runtime_env": {"env_vars": WITHOUT_A_GPU}},
        python=PYTHON,
        deadline_s=300,
    ) as fleet:
        at = fleet.addresses()
        assert fleet.weight_versions() == {"worker-0": None, "worker-1": None}
        assert fleet.set_weight_version(4) == {"worker-0": 4, "worker-1": 4}
        with pytest.raises(Conflict):
            fleet.set_weight_version(3)
        with opened(engine=backend(at["worker-0"], "worker")) as door:
            assert door.request("PUT", "/api/v1/workers/worker-1", {"url": at["worker-1"]}).is_success
            said = door.client.set_weight_version(4)["workers"]
            assert [entry["loaded_weight_version"] for entry in said] == [4, 4]
            for rollout in door.register(n=6):
                assert [delta["weight_version"] for delta in play(door, rollout, 3)] == [4] * 3
                door.client.seal(rollout["rollout_id"], reward=1.0)
            assert {event["writer"] for event in door.events("call_committed")} == {"worker-0", "worker-1"}
            exact(door, "g")
        hosted = hosted_processes(tmp_path / "lake")
        assert len(hosted) == 2
        engines = descendants(hosted)
        assert len(engines) >= 2
    wait_gone([*hosted, *engines])
