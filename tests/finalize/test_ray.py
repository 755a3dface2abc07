"""On a real Ray of two nodes: judging in actors, rows as a Ray Data dataset, errors that come back as they were."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs

from tests.api.scripted_engine import ScriptedEngine
from tests.finalize.conftest import Field, group
from tokenlake import errors
from tokenlake.api.cli import main
from tokenlake.api.client import Client
from tokenlake.api.serve import embedded
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment, Settings
from tokenlake.errors import ConfigError, DamagedLake, Deadline, NotFound, TokenlakeError
from tokenlake.finalize import judge, publish
from tokenlake.finalize.publish import publish_due, set_policy
from tokenlake.store.export import Exporter
from tokenlake.store.objects import Objects
from tokenlake.store.reader import Lake
from tokenlake.store.rowreader import RowReader
from tokenlake.store.schema import ROW

ray = pytest.importorskip("ray")
from tokenlake.finalize import FinalizerPool, ray_pool, read_rows  # noqa: E402  # needs Ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Ray leaves sockets and files to the garbage collector, and warns of its own future.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "ray.md"
NAMES = [f"g{number}" for number in range(6)]
CLOCK = 2_000_000_000_000_000


@pytest.fixture(scope="module")
def nodes() -> Iterator[set[str]]:
    """The ids of two nodes, each of which has a seat for one actor, and room for tasks beside it."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 80_000_000, "resources": {"seat": 1}}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    cluster.add_node(**small)
    ray.init(address=cluster.address, log_to_driver=False)
    yield {node["NodeID"] for node in ray.nodes()}
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """Five groups to publish and one to drop."""
    field = Field(tmp_path_factory.mktemp("due"))
    set_policy(field.lake, {"min_valid_fraction_per_group": 0.3})
    field.add(*(record for name in NAMES[:5] for record in group(name, [1.0, None, 0.5])), *group("g5", [None, None]))
    yield field
    field.lake.close()


@pytest.fixture(scope="module")
def pool(nodes: set[str], due: Field) -> Iterator[FinalizerPool]:
    with FinalizerPool(due.path, actors=2, options={"resources": {"seat": 1}}) as made:
        yield made


def at(pool: FinalizerPool, ask: Callable[[Any], Any]) -> list[Any]:
    """What each actor says."""
    return ray.get([actor.__ray_call__.remote(ask) for actor in pool._actors])


def copied(field: Field, folder: Path) -> Field:
    shutil.copytree(field.path, folder / "lake", ignore=shutil.ignore_patterns("*.lock", "index.duckdb*"))
    return Field(folder)


def files(field: Field) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (field.path / "rows").glob("*.arrow")}


def test_a_shard_whose_actor_was_killed_is_judged_again_and_is_the_same(pool: FinalizerPool, due: Field) -> None:
    before = at(pool, lambda _: os.getpid())
    upto = due.lake.lineage.head + 1
    waiting = [actor.judge.remote(NAMES[:2], CLOCK, upto) for actor in pool._actors]
    os.kill(before[0], signal.SIGKILL)
    due.lake.lineage.append("weight_version_published", weight_version=9)
    assert [pool._answer(each) for each in waiting] == [judge.judge(due.lake, NAMES[:2], CLOCK)] * 2
    after = at(pool, lambda _: os.getpid())
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)


def test_an_actor_that_does_not_see_what_the_owner_wrote_does_not_judge(pool: FinalizerPool, due: Field) -> None:
    at(pool, lambda _: setattr(ray_pool, "_SEEN_S", 0))
    with pytest.raises(Deadline, match="is not to be seen from") as raised:
        list(pool(NAMES, now=CLOCK, upto=due.lake.lineage.head + 1))
    assert raised.value.detail == {"event_seq": due.lake.lineage.head + 1}


def test_actors_on_two_nodes_give_the_bytes_that_this_process_gives(
    nodes: set[str], pool: FinalizerPool, due: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = copied(due, tmp_path / "here")
    monkeypatch.setattr(judge, "_GROUPS_AT_ONCE", 3)
    wanted = publish_due(here.lake, now=CLOCK)
    assert [each.dropped for each in wanted] == [None] * 5 + ["min_valid_fraction_per_group"]
    assert set(at(pool, lambda _: ray.get_runtime_context().get_node_id())) == nodes
    assert publish_due(due.lake, now=CLOCK, judges=pool) == wanted
    assert publish_due(due.lake, now=CLOCK, judges=pool) == []
    assert files(due) == files(here)
    assert sorted(files(due)) == ["000000.arrow", "000001.arrow"]
    assert due.rows("SELECT kind FROM audit_findings") == []
    here.lake.close()


def test_every_error_comes_back_from_ray_as_it_was(nodes: set[str]) -> None:
    @ray.remote
    def fail(error: TokenlakeError) -> None:
        raise error

    for name in errors.__all__:
        error = getattr(errors, name)("what, where and what to do", pid=7)
        with pytest.raises(type(error)) as raised:
            ray.get(fail.remote(error))
        assert (raised.value.message, raised.value.detail) == (error.message, error.detail)


def test_ready_rows_are_read_by_tasks_each_once_and_not_by_the_caller(
    nodes: set[str], due: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_due(due.lake, now=CLOCK)
    with monkeypatch.context() as patch:
        patch.delattr(RowReader, "read")
        rows = read_rows(due.path, groups_per_block=2)
        found = pa.concat_tables(rows.iter_batches(batch_size=None, batch_format="pyarrow"))
    wanted = due.lake.sql(f"SELECT {', '.join(ROW.names)} FROM ready_rows").to_arrow_table()
    assert found.sort_by("sample_id").to_pylist() == wanted.sort_by("sample_id").to_pylist()
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    with Lake(due.path) as lake:
        Exporter(lake, Objects("store", store)).run()
    from_store = read_rows("store", filesystem=store, groups_per_block=1).iter_batches(
        batch_size=None, batch_format="pyarrow"
    )
    assert pa.concat_tables(from_store).sort_by("sample_id").equals(found.sort_by("sample_id"))
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    exec(compile(example, str(PAGE), "exec"), names := {"path": due.path})
    assert sorted(row["tokens"] for row in names["lengths"].take_all()) == sorted(
        map(len, found["input_ids"].to_pylist())
    )
    damaged = shutil.copytree(due.path, tmp_path / "damaged")
    (damaged / "rows" / "000000.arrow").unlink()
    with pytest.raises(DamagedLake, match="cannot be read"):
        read_rows(damaged).materialize()


def test_the_command_and_the_service_have_actors_judge_where_they_are_told_to(
    nodes: set[str], field: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(publish, "judge")
    field.add(*group("g", [1.0, None]))
    field.lake.close()
    assert main(["finalize", "--lake", str(field.path), "--actors", "1"]) == 0
    field.restart()
    settings = Settings(finalizer_actors=1, control_deadline_s=120)
    environment = Environment(token="t", token_given=True, capability_key=None, state_dir=tmp_path / "state")
    service = Service(field.lake, ScriptedEngine(), settings, environment)  # type: ignore[arg-type]
    with embedded(service) as running, Client(running.url, "t", deadline_s=120) as client:
        client.register_group("h", 1)
        assert client.publish("h")["reasons"] == {"never_sealed": 1}
    assert field.rows("SELECT group_id, state FROM groups ORDER BY ALL") == [("g", "published"), ("h", "published")]


def test_what_does_not_fit_is_refused_before_ray_is_asked(due: Field) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        FinalizerPool(due.path, actors=0)
    with pytest.raises(ConfigError, match="at least 1"):
        read_rows(due.path, groups_per_block=0)
    with pytest.raises(NotFound, match="nothing"):
        read_rows(due.path, groups=["nothing"])
