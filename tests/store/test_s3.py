"""Rows on S3, over pyarrow's own client and a server of that protocol: `make test-s3`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import torch
from pyarrow import fs
from torch.utils.data import DataLoader

from tests.finalize.conftest import Field, group
from tokenlake.api.cli import main
from tokenlake.errors import DamagedLake, NotFound, StorageFailed, Unauthorized
from tokenlake.finalize import RowLoader
from tokenlake.store.objects import Objects

SERVER = os.environ.get("TOKENLAKE_TEST_S3_SERVER")
"""The program `moto_server`."""
pytestmark = pytest.mark.skipif(SERVER is None, reason="TOKENLAKE_TEST_S3_SERVER is not set")


class Server:
    """A server that takes every credential until it has had this many calls."""

    def __init__(self, free: int) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port: int = found.getsockname()[1]
        self._free = free

    def __enter__(self) -> Self:
        command = [str(SERVER), "-H", "127.0.0.1", "-p", str(self._port)]
        environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(self._free)}
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
        until = time.monotonic() + 60
        while True:
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self
            assert self._process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def uri(self, place: str, more: str = "") -> str:
        return f"s3://{place}?scheme=http&endpoint_override=127.0.0.1:{self._port}&region=us-east-1{more}"

    def make(self, bucket: str) -> None:
        fs.FileSystem.from_uri(self.uri(bucket, "&allow_bucket_creation=true"))[0].create_dir(bucket)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(free=1_000_000) as made:
        yield made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    field = Field(tmp_path_factory.mktemp("s3"))
    field.publish(*group("g0", [1.0, None, 0.5]), *group("g1", [1.0]))
    field.publish(*group("g2", [0.0]), *group("e", [1.0], purpose="eval"))
    field.lake.close()
    return field.path


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "secret"), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_rows_go_to_a_bucket_and_come_out_of_it(server: Server, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = server.uri("bucket/runs/1")
    export = ["export", "--lake", str(path), uri]
    assert main(export) == 2
    assert "there is no such bucket" in capsys.readouterr().err
    server.make("bucket")
    with pytest.raises(NotFound, match="s3://bucket/runs/1 holds no exported rows"):
        list(RowLoader(uri))
    assert [main(export), main(export)] == [0, 0]
    assert [line[:18] for line in capsys.readouterr().out.splitlines()] == ["exported 4 groups,", "exported 0 groups,"]
    for here, there in zip(RowLoader(path), RowLoader(uri), strict=True):
        assert torch.equal(here["input_ids"], there["input_ids"])
        assert here["sample_ids"] == there["sample_ids"]
    batches = DataLoader(RowLoader(uri), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(name for batch in batches for name in batch["group_ids"]) == ["g0", "g1", "g2"]
    store, bucket = Objects(uri), fs.FileSystem.from_uri(uri)[0]
    bucket.delete_file(f"bucket/runs/1/rows/{store.names('rows')[0]}")
    with pytest.raises(DamagedLake, match="is gone, and the catalog there names it"):
        list(RowLoader(uri))


def test_an_upload_that_is_killed_half_way_shows_nothing(server: Server) -> None:
    server.make("killed")
    uri = server.uri("killed/x")
    half = """
import os, sys
from tokenlake.store.objects import Objects
store = Objects(sys.argv[1])
out = store._fs.open_output_stream(store._path + "/rows/half")
out.write(bytes(16 << 20))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", half, uri], check=False).returncode == 9
    store = Objects(uri)
    assert store.names("rows") == []
    store.put("rows/half", bytes(16 << 20))
    assert store.names("rows") == ["half"]


def test_a_store_that_is_away_is_an_error() -> None:
    store = Objects(Server(free=0).uri("bucket"))
    with pytest.raises(StorageFailed, match="s3://bucket/a could not be written"):
        store.put("a", b"")


def test_credentials_that_are_refused_are_named_as_that() -> None:
    with Server(free=0) as server:
        store = Objects(server.uri("bucket"))
        for refused in (lambda: store.put("a", b"x"), lambda: store.names("a"), lambda: store.get("a", "0")):
            with pytest.raises(Unauthorized, match="refused to these credentials"):
                refused()
