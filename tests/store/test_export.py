"""Ready rows on an object store: what a trainer elsewhere reads is what was published, or it is an error."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs
from torch.utils.data import DataLoader

from tests.finalize.conftest import Field, call, group
from tokenlake.api.cli import main
from tokenlake.errors import ConfigError, Conflict, DamagedLake, FormatError, NotFound, StorageFailed
from tokenlake.finalize import RowLoader
from tokenlake.store import export, objects
from tokenlake.store.export import Export, Exporter
from tokenlake.store.objects import Objects
from tokenlake.store.reader import Lake

STORES: dict[str, Callable[[Path], tuple[str, fs.FileSystem | None]]] = {
    "folder": lambda folder: (f"file://{folder}/store", None),
    "filesystem": lambda folder: (f"{folder}/store", fs.LocalFileSystem()),
    "subtree": lambda folder: ("store", fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())),
    "fsspec": lambda folder: (f"fsspec+memory://{folder}/store", None),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups in two files, and one for evaluation; versions that change, and placeholders."""
    made = Field(tmp_path_factory.mktemp("export"))
    made.publish(*group("g0", [1.0, None, 0.5]), *group("g1", [1.0], weight_version=8))
    made.publish(
        *group("g2", [None, 0.0]),
        *group("e0", [1.0], purpose="eval"),
        {"type": "group", "group_id": "g3", "n": 1},
        call("g3_g0", "a", [1], [2, 3]),
        call("g3_g0", "b", [1, 2, 3, 4], [5], weight_version=8),
        {"type": "seal", "rollout_id": "g3_g0", "reward": 1.0},
    )
    made.lake.close()
    return made.path


def copied(path: Path, folder: Path) -> Path:
    return shutil.copytree(path, folder / "lake", ignore=shutil.ignore_patterns("*.lock", "index.duckdb*"))


@pytest.fixture
def path(published: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return copied(published, tmp_path)


@pytest.fixture
def field(path: Path) -> Iterator[Field]:
    """The copy, owned."""
    made = Field(path.parent)
    yield made
    made.lake.close()


@pytest.fixture
def lake(path: Path) -> Iterator[Lake]:
    with Lake(path) as opened:
        yield opened


def exported(lake: Lake, store: Path) -> Export:
    return Exporter(lake, Objects(store)).run()


def files(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if ".part-" not in path.name and path.is_file()
    }


def names(loader: RowLoader) -> list[str]:
    return [name for batch in loader for name in batch["group_ids"]]


def assert_same(one: RowLoader, other: RowLoader) -> None:
    for a, b in zip(one, other, strict=True):
        assert {name: value for name, value in a.items() if isinstance(value, list)} == {
            name: value for name, value in b.items() if isinstance(value, list)
        }
        assert all(torch.equal(a[name], b[name]) for name, value in a.items() if isinstance(value, torch.Tensor))  # type: ignore[literal-required]


@pytest.mark.parametrize("kind", STORES)
def test_a_loader_gets_the_tensors_that_it_gets_from_the_lake(lake: Lake, tmp_path: Path, kind: str) -> None:
    uri, filesystem = STORES[kind](tmp_path)
    done = Exporter(lake, Objects(uri, filesystem)).run()
    assert (done.groups, done.files) == (5, 2)
    assert done.bytes == sum(path.stat().st_size for path in (lake.path / "rows").glob("*.arrow"))
    for options in (
        {},
        {"purpose": None, "seed": 3},
        {"groups": ["g3", "e0"], "pack_tokens": 9},
        {"rank": 1, "world_size": 2},
    ):
        given: dict[str, Any] = {"groups_per_batch": 2, "token_versions": True, **options}
        assert_same(RowLoader(uri, filesystem=filesystem, **given), RowLoader(lake.path, **given))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_open_the_store_themselves(lake: Lake, tmp_path: Path) -> None:
    uri, filesystem = STORES["subtree"](tmp_path)
    Exporter(lake, Objects(uri, filesystem)).run()
    next(iter(RowLoader(uri, filesystem=filesystem)))
    loader = RowLoader(uri, filesystem=filesystem)
    batches = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(names(batches)) == ["g0", "g1", "g2", "g3"]  # type: ignore[arg-type]


def test_what_is_there_stays_and_only_what_is_new_is_written(
    field: Field, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_STRETCH", 2)
    store = tmp_path / "store"
    exporter = Exporter(lake, Objects(store))
    exporter.run()
    before = files(store)
    assert exporter.run() == exported(lake, store) == Export(groups=0, files=0, bytes=0)
    assert files(store) == before
    loader = RowLoader(f"file://{store}")
    assert names(loader) == ["g0", "g1", "g2", "g3"]
    field.publish(*group("g4", [1.0]))
    assert exported(lake, store).groups == 1
    assert before.items() <= files(store).items()
    assert names(loader) == ["g4"]
    field.publish(*group("g5", [1.0]))
    assert exporter.run().groups == 1
    assert names(loader) == ["g5"]
    assert_same(RowLoader(f"file://{store}", purpose=None), RowLoader(lake.path, purpose=None))


def test_an_export_that_is_killed_anywhere_shows_whole_groups_and_is_gone_on_with(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_STRETCH", 2)
    whole = tmp_path / "whole"
    exported(lake, whole)
    every = names(RowLoader(f"file://{whole}", purpose=None))
    write = Objects._write
    for kill in range(len(files(whole))):
        store, written = tmp_path / str(kill), iter(range(99))

        def write_half(self: Objects, path: str, data: Any, kill: int = kill, written: Iterator[int] = written) -> None:
            if next(written) == kill:
                write(self, path, bytes(data)[: len(bytes(data)) // 2])
                raise KeyboardInterrupt
            write(self, path, data)

        with monkeypatch.context() as patch:
            patch.setattr(Objects, "_write", write_half)
            with pytest.raises(KeyboardInterrupt):
                exported(lake, store)
        if (store / "catalog").exists() and any(store.glob("catalog/*.json")):
            seen = names(RowLoader(f"file://{store}", purpose=None))
            assert seen == every[: len(seen)]
            assert len(seen) < len(every)
        else:
            with pytest.raises(NotFound, match="holds no exported rows"):
                list(RowLoader(f"file://{store}"))
        exported(lake, store)
        assert files(store) == files(whole)


def test_an_object_that_the_disk_refused_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Objects(tmp_path)

    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(objects, "_sync", full)
        with pytest.raises(StorageFailed, match="No space left"):
            store.put("rows/x", b"much")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    store.put("rows/x", b"much")
    assert store.names("rows") == ["x"]


@pytest.mark.parametrize("first", [0, 1])
def test_two_exports_at_once_say_the_same_thing_twice(field: Field, lake: Lake, tmp_path: Path, first: int) -> None:
    store = Objects(tmp_path / "store")
    with Lake(field.path) as sees_less:
        exporters = [Exporter(sees_less, store), Exporter(lake, store)]
        field.publish(*group("g4", [1.0]))
        lake.refresh()
        for each in exporters:
            each._lake.refresh = each._catalog.refresh = lambda: None  # type: ignore[method-assign]
        done = [each.run().groups for each in (exporters if first else exporters[::-1])]
    assert sorted(done) == [5, 6]
    assert_same(RowLoader(f"file://{store.name}", purpose=None), RowLoader(lake.path, purpose=None))
    assert exported(lake, tmp_path / "store") == Export(groups=0, files=0, bytes=0)


@pytest.mark.parametrize("folder", ["rows", "versions", "catalog"])
@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
def test_what_is_not_what_was_written_is_an_error_and_never_a_smaller_group(
    lake: Lake, tmp_path: Path, folder: str, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_STRETCH", 2)
    store = tmp_path / "store"
    exported(lake, store)
    path = min((store / folder).iterdir())
    data = path.read_bytes()
    match harm:
        case "changed":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "cut":
            path.write_bytes(data[:-1])
        case _:
            path.unlink()
    with pytest.raises(DamagedLake, match=folder):
        list(RowLoader(f"file://{store}", purpose=None, token_versions=True))


def spoil(path: Path) -> None:
    """Change the second log-probability of the row g0_g2, -0.625."""
    path.write_bytes(path.read_bytes().replace(b"\x00\x00\x20\xbf", b"\x00\x00\x21\xbf", 1))


def test_rows_that_are_not_as_published_are_not_exported(lake: Lake, tmp_path: Path) -> None:
    path = lake.path / "rows" / "000000.arrow"
    spoil(path)
    with pytest.raises(DamagedLake, match="row g0_g2 does not have its digest"):
        exported(lake, tmp_path / "store")
    path.unlink()
    with pytest.raises(DamagedLake, match=r"000000.arrow cannot be read"):
        exported(lake, tmp_path / "store")
    with pytest.raises(NotFound):
        list(RowLoader(f"file://{tmp_path}/store"))


def test_a_reader_computes_the_digests_of_rows_again(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(lake.path / "rows" / "000000.arrow")
    with monkeypatch.context() as patch:
        patch.setattr(export, "check_digests", lambda *_: None)
        exported(lake, tmp_path / "store")
    with pytest.raises(DamagedLake, match="row g0_g2 does not have its digest"):
        list(RowLoader(f"file://{tmp_path}/store"))


def test_another_lake_and_a_copy_that_knows_less_are_refused(field: Field, lake: Lake, tmp_path: Path) -> None:
    less, other = copied(field.path, tmp_path / "less"), copied(field.path, tmp_path / "other")
    head = other / "lake.json"
    head.write_text(head.read_text().replace(lake.lake_id, "another"))
    field.publish(*group("g4", [1.0]))
    exported(lake, tmp_path / "store")
    for path in (less, other):
        with Lake(path) as opened, pytest.raises(Conflict, match="name another folder"):
            exported(opened, tmp_path / "store")


def test_a_group_that_is_not_exported_yet_is_named_and_found_once_it_is(
    field: Field, lake: Lake, tmp_path: Path
) -> None:
    exported(lake, tmp_path / "store")
    field.publish(*group("g4", [1.0]))
    loader = RowLoader(f"file://{tmp_path}/store", groups=["g4"])
    with pytest.raises(NotFound, match="g4 has not been exported"):
        list(loader)
    exported(lake, tmp_path / "store")
    assert names(loader) == ["g4"]


def test_a_newer_format_is_refused_by_name(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tokenlake.store.exported.FORMAT_VERSION", 99)
        exported(lake, tmp_path / "store")
    with pytest.raises(FormatError, match="has format 99"):
        list(RowLoader(f"file://{tmp_path}/store"))


@pytest.mark.parametrize("uri", ["s4://key:secret@bucket/x?token=secret", "s3:///x?secret", "fsspec+no://secret@x"])
def test_an_address_that_is_none_is_refused_and_no_secret_of_it_is_told(uri: str) -> None:
    with pytest.raises(ConfigError, match="names no file system") as raised:
        Objects(uri)
    assert "secret" not in str(raised.value)
    assert Objects("s3://key:secret@bucket/x?scheme=http&region=r").name == "s3://bucket/x"


def test_a_file_that_serves_many_groups_is_fetched_once_while_there_is_room(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(lake, tmp_path / "store")
    fetched: list[str] = []
    get = Objects.get
    monkeypatch.setattr(Objects, "get", lambda self, name, sha256: fetched.append(name) or get(self, name, sha256))
    turns = ["g0", "g2", "g1", "g3"]
    assert names(RowLoader(f"file://{tmp_path}/store", groups=turns)) == turns
    assert [name.partition("/")[0] for name in fetched] == ["catalog", "rows", "rows"]
    fetched.clear()
    monkeypatch.setattr("tokenlake.store.rowreader._MAX_BYTES", 1)
    assert names(RowLoader(f"file://{tmp_path}/store", groups=turns)) == turns
    assert [name.partition("/")[0] for name in fetched] == ["catalog", *["rows"] * 4]


def test_the_command_exports_once_or_goes_on_until_it_is_stopped(
    field: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", "--lake", str(field.path), f"file://{tmp_path}/store"]
    assert main(command) == 0
    assert re.fullmatch(r"exported 5 groups, \d+ bytes in 2 files, to file:///.*/store\n", capsys.readouterr().out)
    rounds = iter(range(9))

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        match next(rounds):
            case 0:
                monkeypatch.setattr(Exporter, "run", refuse)
            case 1:
                monkeypatch.undo()
                monkeypatch.setattr(time, "sleep", sleep)
                field.publish(*group("g4", [1.0]))
            case _:
                raise KeyboardInterrupt

    def refuse(self: Exporter) -> Export:
        raise StorageFailed("the store is away")

    monkeypatch.setattr(time, "sleep", sleep)
    assert main([*command, "--every", "0.5"]) == 130
    said = capsys.readouterr()
    assert said.err == "tokenlake: the store is away; it is tried again\n"
    assert re.fullmatch(r"exported 1 groups, .*\n", said.out)
    monkeypatch.setattr(Exporter, "run", refuse)
    assert main(command) == 2
