"""B49: what a forked child does with handles it inherited, it does for itself or not at all; the parent goes on."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenlake
from tests.api.scripted_engine import ScriptedEngine
from tests.finalize.conftest import Field, group
from tokenlake.api.client import Client
from tokenlake.api.serve import Running, embedded
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment, Settings
from tokenlake.errors import TokenlakeError
from tokenlake.finalize import RowLoader
from tokenlake.finalize.buffer import ReplayBuffer
from tokenlake.finalize.publish import publish_due, set_policy
from tokenlake.finalize.sources import LakeSource, StoreSource
from tokenlake.ingest.importer import import_file
from tokenlake.store.export import Exporter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.objects import Objects
from tokenlake.store.reader import Lake
from tokenlake.store.schema import ROW

COUNT = "SELECT count(*) FROM ready_rows"
REFUSED = "cannot be used in its child"
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Handles:
    """Everything that a process may have open, used before the fork."""

    def __init__(self, folder: Path) -> None:
        self.field = Field(folder)
        self.field.publish(*group("g0", [1.0, None]), *group("g1", [1.0]))
        self.file = folder / "1.jsonl"
        self.owner: OwnedLake = self.field.lake
        self.buffer = ReplayBuffer(self.owner)
        self.lake = Lake(self.field.path)
        self.connection = self.lake.connect()
        self.relation = self.lake.sql(COUNT)
        Exporter(self.lake, Objects(folder / "store")).run()
        self.source, self.store = LakeSource(self.field.path), StoreSource(Objects(folder / "store"))
        for source in (self.source, self.store):
            source.rows(source.groups("train"))
        self.loader = RowLoader(self.field.path)
        self.started, self.ahead = iter(RowLoader(self.field.path)), iter(RowLoader(self.field.path, prefetch=1))
        next(self.started)
        next(self.ahead)


WORKS: dict[str, tuple[Callable[[Handles], Any], Any]] = {
    "query": (lambda made: made.lake.sql(COUNT).fetchall(), [(3,)]),
    "connect": (lambda made: made.lake.connect().sql(COUNT).fetchall(), [(3,)]),
    "refresh": (lambda made: made.lake.refresh(), None),
    "connection": (lambda made: made.connection.sql(COUNT).fetchall(), [(3,)]),
    "relation": (lambda made: made.relation.fetchall(), [(3,)]),
    "source": (lambda made: made.source.rows(made.source.groups("train")).num_rows, 3),
    "store": (lambda made: made.store.rows(made.store.groups("train")).num_rows, 3),
    "loader": (lambda made: [batch["group_ids"] for batch in made.loader], [["g0"], ["g1"]]),
    "started loader": (lambda made: next(made.started)["group_ids"], ["g1"]),
    "prefetching loader": (lambda made: next(made.ahead)["group_ids"], ["g1"]),
    "export": (lambda made: Exporter(made.lake, made.store._catalog.store).run().groups, 0),
}
REFUSES: dict[str, Callable[[Handles], Any]] = {
    "query": lambda made: made.owner.sql(COUNT),
    "connect": lambda made: made.owner.connect(),
    "publish": lambda made: publish_due(made.owner),
    "policy": lambda made: set_policy(made.owner, {"rows": "segments"}),
    "rows": lambda made: made.owner.write_rows(ROW.empty_table()),
    "event": lambda made: made.owner.lineage.append("policy_set"),
    "anchor": lambda made: made.owner.lineage.anchor(),
    "compact": lambda made: made.owner.compact(),
    "rebuild": lambda made: made.owner.rebuild(),
    "close": lambda made: made.owner.close(),
    "import": lambda made: import_file(made.owner, made.file),
    "claim": lambda made: made.buffer.claim("a"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handles]:
    handles = Handles(tmp_path_factory.mktemp("forks"))
    yield handles
    handles.lake.close()
    handles.field.lake.close()


def in_a_child(ask: Callable[[], Any]) -> Any:
    """What a forked child gets, or the message of what it is told."""
    ours, theirs = multiprocessing.Pipe()

    def work() -> None:
        try:
            theirs.send(ask())
        except TokenlakeError as error:
            theirs.send(error.message)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert ours.poll(60)
    found = ours.recv()
    process.join()
    assert process.exitcode == 0
    ours.close()
    theirs.close()
    return found


def test_a_child_reads_for_itself(made: Handles, subtests: pytest.Subtests) -> None:
    for name, (ask, wanted) in WORKS.items():
        with subtests.test(name):
            assert in_a_child(lambda ask=ask: ask(made)) == wanted


def test_a_child_writes_nothing_through_what_it_inherited(made: Handles, subtests: pytest.Subtests) -> None:
    before = made.field.rows("SELECT count(*) FROM lineage")
    for name, ask in REFUSES.items():
        with subtests.test(name):
            assert REFUSED in in_a_child(lambda ask=ask: ask(made))
    made.field.restart()
    assert made.field.rows("SELECT count(*) FROM lineage WHERE event_type <> 'lake_opened'") == [(before[0][0] - 1,)]
    assert made.field.rows("SELECT kind FROM audit_findings") == []
    assert len(made.field.publish(*group("after", [1.0]))) == 1
    made.owner, made.buffer = made.field.lake, ReplayBuffer(made.field.lake)


def test_a_client_and_a_loader_over_http_work_in_a_child_and_a_service_does_not(tmp_path: Path) -> None:
    field = Field(tmp_path)
    field.publish(*group("g0", [1.0]), *group("g1", [1.0]))
    environment = Environment(token="t", token_given=True, capability_key=None, state_dir=tmp_path / "state")
    running: Running
    with (
        embedded(Service(field.lake, ScriptedEngine(), Settings(), environment)) as running,  # type: ignore[arg-type]
        Client(running.url, "t") as client,
    ):
        started = iter(RowLoader(running.url, token="t"))
        next(started)
        assert in_a_child(lambda: client.group("g0")["state"]) == "published"
        assert in_a_child(lambda: next(started)["group_ids"]) == ["g1"]
        assert REFUSED in in_a_child(lambda: running.service.lake.lineage.append("policy_set"))
        assert client.group("g0")["state"] == "published"
        assert next(started)["group_ids"] == ["g1"]
    field.lake.close()


def test_a_child_that_ends_as_any_process_does_leaves_no_crash(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom tokenlake.store.lake import OwnedLake\nfrom tokenlake.store.reader import Lake\n"
        "owner = OwnedLake.open(sys.argv[1])\nlake = Lake(sys.argv[1])\n"
        "for used in (False, True):\n"
        "    if (child := os.fork()) == 0:\n"
        "        used and lake.sql('SELECT 1').fetchall()\n"
        "        sys.exit(7)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "lake")],
        env={"PYTHONPATH": str(Path(tokenlake.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["7", "7"], done.stderr
