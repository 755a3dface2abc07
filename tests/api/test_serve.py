"""The process that serves."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest

from tokenlake.api import serve
from tokenlake.api.cli import main


def test_a_process_that_serves_collects_seldom_and_not_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    during: list[tuple[bool, bool]] = []

    class Server:
        def __init__(self, config: object) -> None: ...

        async def serve(self, sockets: list[socket.socket]) -> None:
            during.append((gc.get_freeze_count() > before[1], gc.get_threshold() > before[0]))
            sockets[0].close()

    monkeypatch.setattr(serve.uvicorn, "Server", Server)
    monkeypatch.setenv("TOKENLAKE_CAPABILITY_KEY", "ab" * 32)
    assert main(["serve", "--lake", str(tmp_path / "lake"), "--port", "0"]) == 0
    assert during == [(True, True)]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--port", "99999"], "port 99999 is not from 0 to 65535"),
        (["--port", "0", "--set", f"min_free_bytes={1 << 60}"], "bytes free"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert main(["serve", "--lake", str(tmp_path / "lake"), *arguments]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), why in err) == (1, True)
