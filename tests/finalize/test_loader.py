"""The loader: whole groups, once each, in a pinned order, the same tensors from a folder and from a service."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from tests.api.scripted_engine import ScriptedEngine
from tests.finalize.conftest import Field, call, group
from tokenlake.api.serve import embedded
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment, Settings
from tokenlake.errors import ConfigError, DamagedLake, EngineFailed, NotFound, Unauthorized
from tokenlake.finalize import RowLoader
from tokenlake.finalize.sources import LakeSource
from tokenlake.finalize.tensors import Batch, _lists, next_token, padded
from tokenlake.store.lake import OwnedLake

NAMES = [f"g{number}" for number in range(7)]
TENSORS = [name for name, kind in Batch.__annotations__.items() if "Tensor" in str(kind)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven groups of a valid row, a placeholder and a longer valid row; and one for evaluation."""
    field = Field(tmp_path_factory.mktemp("loader"))
    field.publish(*[record for name in NAMES[:4] for record in group(name, [1.0, None, 0.5])])
    field.publish(*[record for name in NAMES[4:] for record in group(name, [1.0, None, 0.5])])
    field.publish(*group("e", [1.0], purpose="eval"))
    field.lake.close()
    return field.path


def groups(batches: Any) -> list[str]:
    return [name for batch in batches for name in batch["group_ids"]]


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(one[name], other[name]) for name in TENSORS) and all(
        one[name] == other[name] for name in ("sample_ids", "group_ids", "reasons")
    )


def test_a_batch_is_whole_groups_padded_with_what_the_row_says(path: Path) -> None:
    first, *_ = RowLoader(path, groups_per_batch=2, pad_id=9)
    assert first["sample_ids"] == [f"{name}_g{index}" for name in ("g0", "g1") for index in range(3)]
    assert first["group_ids"] == ["g0", "g1"]
    assert first["input_ids"][:3].tolist() == [[10, 11, 20, 9, 9], [10, 11, 9, 9, 9], [10, 11, 22, 22, 22]]
    assert first["token_mask"][:3].tolist() == [[0, 0, 1, 0, 0], [0] * 5, [0, 0, 1, 1, 1]]
    assert first["logprobs"][:3].tolist() == [[0, 0, -0.5, 0, 0], [0] * 5, [0, 0, -0.5, -0.625, -0.75]]
    assert first["attention_mask"].sum(1).tolist() == first["lengths"].tolist() == [3, 2, 5] * 2
    assert first["sample_mask"].tolist() == [1, 0, 1] * 2
    assert (first["rewards"].tolist(), first["rewards"].dtype) == ([1.0, 0.0, 0.5] * 2, torch.float64)
    assert first["weight_version_min"].tolist() == [7, -1, 7] * 2
    assert first["group_index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert first["reasons"] == [None, "environment_failed", None] * 2


@pytest.mark.parametrize("name", ["input_ids", "token_mask", "logprobs"])
def test_a_rows_array_is_the_file_itself_until_it_is_copied_into_a_batch(path: Path, name: str) -> None:
    source = LakeSource(path)
    lists = list(_lists(source.rows(NAMES).column(name)))
    files = {str(file) for file in (path / "rows").glob("*.arrow")}
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [[int(end, 16) for end in line[0].split("-")] for line in maps if line[-1] in files]
    for values, _ in lists:
        assert any(first <= values.ctypes.data < last for first, last in mapped)
    assert sum(offsets[-1] - offsets[0] for _, offsets in lists) == 7 * (3 + 2 + 5)
    source.close()


@pytest.mark.parametrize("name", ["token_mask", "logprobs"])
def test_a_row_whose_arrays_differ_in_length_is_damage_also_where_all_rows_together_fit(path: Path, name: str) -> None:
    source = LakeSource(path)
    table = source.rows(["g0", "g1"])
    column = table.column(name).combine_chunks()
    # The lists of the first two rows trade lengths: 2 and 3 for 3 and 2.
    offsets = pa.array([0, 2, *(column.offsets.to_numpy() - column.offsets[0].as_py())[2:]], pa.int32())
    wrong = pa.ListArray.from_arrays(offsets, column.flatten())
    with pytest.raises(DamagedLake, match=name):
        padded(table.set_column(table.schema.get_field_index(name), name, wrong), ["g0", "g1"], 0)
    source.close()


def test_no_delta_is_taken_in_for_rows_and_all_are_for_their_versions(path: Path) -> None:
    source = LakeSource(path)
    assert source.groups(None) == [*NAMES, "e"]
    assert source.rows(NAMES).num_rows == 21
    assert source._lake.sql("SELECT count(*) FROM tl_places").fetchall() == [(0,)]
    assert len(source.versions(NAMES)) == 14
    source.close()


def test_versions_of_some_groups_cost_those_groups(path: Path) -> None:
    source = LakeSource(path)
    costs: list[int] = []
    for names in (NAMES[:1], NAMES[3:5]):
        whole = source._whole
        before = 0 if whole is None else whole.decoded
        source.versions(names)
        assert source._whole is not None
        costs.append(source._whole.decoded - before)
    assert costs[1] == 2 * costs[0] > 0
    source.close()


def test_groups_come_once_in_the_order_of_publication_or_of_the_seed(path: Path) -> None:
    assert groups(RowLoader(path)) == NAMES
    assert groups(RowLoader(path, purpose="eval")) == ["e"]
    shuffled = groups(RowLoader(path, seed=1))
    assert sorted(shuffled) == NAMES
    assert shuffled == groups(RowLoader(path, seed=1, groups_per_batch=3))
    assert shuffled not in (NAMES, groups(RowLoader(path, seed=2)))
    assert groups(RowLoader(path, groups=["g5", "e"])) == ["g5", "e"]


@pytest.mark.parametrize("seed", [None, 3])
def test_ranks_and_workers_share_the_groups_without_overlap(path: Path, seed: int | None) -> None:
    shares = [groups(RowLoader(path, seed=seed, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == NAMES
    if seed is None:
        assert shares[1] == ["g1", "g4"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_of_every_kind_give_each_group_once(path: Path, method: str) -> None:
    loader = RowLoader(path, rank=1, world_size=2, prefetch=1)
    context = multiprocessing.get_context(method)
    batches = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context=context)
    found = list(batches)
    assert sorted(groups(found)) == ["g1", "g3", "g5"]
    wanted = {batch["group_ids"][0]: batch for batch in RowLoader(path)}
    assert all(same(batch, wanted[batch["group_ids"][0]]) for batch in found)


def test_a_saved_state_goes_on_where_it_was(path: Path) -> None:
    loader = RowLoader(path, seed=5)
    taken: list[str] = []
    for batch in loader:
        taken += batch["group_ids"]
        if len(taken) == 3:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = RowLoader(path, seed=5, prefetch=2)
    resumed.load_state_dict(state)
    assert taken + groups(resumed) == groups(RowLoader(path, seed=5))
    assert groups(resumed) == []
    with pytest.raises(ConfigError, match="seed"):
        RowLoader(path, seed=6).load_state_dict(state)


def test_what_is_no_state_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="state_dict"):
        RowLoader(path).load_state_dict({"epoch": 1})


def test_what_was_only_made_ahead_is_not_counted(path: Path) -> None:
    loader = RowLoader(path, prefetch=3)
    ahead = iter(loader)
    next(ahead)
    assert loader.state_dict()["done"] == ["g0"]
    ahead.close()  # type: ignore[attr-defined]
    assert groups(loader) == NAMES[1:]


def test_prefetching_changes_nothing(path: Path) -> None:
    for one, other in zip(RowLoader(path), RowLoader(path, prefetch=2), strict=True):
        assert same(one, other)


def test_a_loader_goes_on_with_what_is_published_later_and_shares_do_not_move(field: Field) -> None:
    field.publish(*group("a", [1.0]), *group("b", [1.0]), *group("c", [1.0]))
    loader = RowLoader(field.path, rank=0, world_size=2, seed=1)
    first = groups(loader)
    assert sorted(first) == ["a", "c"]
    field.publish(*group("0", [1.0]), *group("1", [1.0]))
    assert groups(loader) == ["1"]


def test_packing_loses_no_token_and_keeps_rows_apart(path: Path) -> None:
    (one,) = RowLoader(path, groups_per_batch=7)
    (many,) = RowLoader(path, groups_per_batch=7, pack_tokens=8, pad_id=0)
    assert many["input_ids"].shape == (7, 8)
    assert many["input_ids"][0].tolist() == [10, 11, 20, 10, 11, 22, 22, 22]
    assert many["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert many["sequence_ids"][0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2]
    for row, (sequence, start, length) in enumerate(
        zip(many["row_sequence"].tolist(), many["row_start"].tolist(), many["lengths"].tolist(), strict=True)
    ):
        assert (sequence < 0) == (one["sample_mask"][row] == 0)
        if sequence >= 0:
            for name in ("input_ids", "token_mask", "logprobs", "attention_mask", "position_ids"):
                assert torch.equal(many[name][sequence, start : start + length], one[name][row, :length])  # type: ignore[literal-required]
    for name in ("rewards", "sample_mask", "group_index", "lengths"):
        assert torch.equal(many[name], one[name])  # type: ignore[literal-required]
    assert many["token_mask"].sum() == (one["token_mask"] * one["sample_mask"][:, None]).sum()
    with pytest.raises(ConfigError, match="g0_g2 has 5 tokens"):
        list(RowLoader(path, pack_tokens=4))


def test_a_rows_first_token_is_nobodys_target(path: Path) -> None:
    (batch,) = RowLoader(path, groups=["g0"], pack_tokens=9)
    batch["token_mask"][0, 3] = 1.0
    shifted = next_token(batch)
    assert shifted.inputs[0].tolist() == [10, 11, 20, 10, 11, 22, 22, 22]
    assert shifted.targets[0].tolist() == [11, 20, 10, 11, 22, 22, 22, 0]
    assert shifted.mask[0].tolist() == [0, 1, 0, 0, 1, 1, 1, 0]
    assert shifted.logprobs[0].tolist() == [0, -0.5, 0, 0, -0.5, -0.625, -0.75, 0]


@pytest.mark.parametrize("pack", [None, 16])
def test_every_sampled_token_has_the_version_it_was_sampled_under(field: Field, pack: int | None) -> None:
    field.publish(
        *group("g", [None, 1.0])[:1],
        call("g_g0", "c0", [1], [2, 3], weight_version=5),
        call("g_g0", "c1", [1, 2, 3, 4], [6], weight_version=6),
        call("g_g0", "c2", [1, 2, 3, 4, 6, 7], [8], weight_version=6, weight_version_end=7),
        {"type": "seal", "rollout_id": "g_g0", "reward": 1.0},
        *group("g", [None, 1.0])[2:],
    )
    (batch,) = RowLoader(field.path, token_versions=True, pack_tokens=pack)
    wanted = [[-1, 5, 5, -1, 6, -1, -1], [-1, -1, 7, 7]]
    for row, versions in enumerate(wanted):
        sequence, start = batch["row_sequence"][row], batch["row_start"][row]
        assert batch["weight_versions"][sequence, start : start + len(versions)].tolist() == versions
    assert int((batch["weight_versions"] >= 0).sum()) == 5
    (silent,) = RowLoader(field.path)
    assert bool((silent["weight_versions"] == -1).all())


@pytest.fixture
def url(path: Path, tmp_path: Path) -> Iterator[str]:
    environment = Environment(token="t", token_given=True, capability_key=None, state_dir=tmp_path)
    with (
        OwnedLake.open(path) as lake,
        embedded(Service(lake, ScriptedEngine(), Settings(), environment)) as running,  # type: ignore[arg-type]
    ):
        yield running.url


def test_a_service_gives_the_same_tensors(path: Path, url: str) -> None:
    how: dict[str, Any] = {"groups_per_batch": 3, "seed": 4, "token_versions": True}
    for one, other in zip(RowLoader(path, **how), RowLoader(url, token="t", **how), strict=True):
        assert same(one, other)
    with pytest.raises(NotFound):
        list(RowLoader(url, token="t", groups=["nothing"]))
    with pytest.raises(Unauthorized, match="401"):
        list(RowLoader(url, token="wrong"))


def test_a_service_that_is_not_there_is_an_error_also_while_prefetching() -> None:
    for prefetch in (0, 2):
        with pytest.raises(EngineFailed):
            list(RowLoader("http://127.0.0.1:1", token="t", prefetch=prefetch))


def test_missing_rows_are_never_silently_fewer(field: Field) -> None:
    field.publish(*group("g", [1.0, 0.0]))
    (file,) = (field.path / "rows").glob("*.arrow")
    with pytest.raises(NotFound):
        list(RowLoader(field.path, groups=["nothing"]))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DamagedLake):
        list(RowLoader(field.path))
    file.unlink()
    with pytest.raises(DamagedLake):
        list(RowLoader(field.path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups_per_batch": 0},
        {"pack_tokens": 0},
        {"rank": 1},
        {"groups": ["g"], "seed": 1},
        {"groups": "g"},
        {"source": "http://127.0.0.1:1"},
    ],
)
def test_what_does_not_fit_together_is_refused(path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RowLoader(**{"source": path, **wrong})
