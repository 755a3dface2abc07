"""A lake made from import records, and what its doors say about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenlake
from tokenlake.api import cli


def group(group_id: str, n: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": "group", "group_id": group_id, "n": n, **more}


def call(rollout_id: str, call_id: str, prompt: list[int], generated: list[int], **more: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "type": "call",
        "rollout_id": rollout_id,
        "call_id": call_id,
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_logprobs": [-0.5] * len(generated),
        "weight_version": 7,
        "finish_reason": "stop",
    }
    return record | more


def seal(rollout_id: str, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {"type": "seal", "rollout_id": rollout_id, "reward": reward, **more}


def fail(rollout_id: str, reason: str = "environment_failed", **more: Any) -> dict[str, Any]:
    return {"type": "fail", "rollout_id": rollout_id, "reason": reason, **more}


class CaseLake:
    """Drives the commands as a user does."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capsys = capsys
        self._files = 0

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        status = cli.main(list(arguments))
        out, err = self._capsys.readouterr()
        return status, out, err

    def write(self, *records: dict[str, Any] | str) -> Path:
        self._files += 1
        file = self.path.parent / f"import-{self._files}.jsonl"
        file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        return file

    def try_import(self, *records: dict[str, Any] | str) -> tuple[int, str, str]:
        return self.run("import", "--lake", str(self.path), str(self.write(*records)))

    def take(self, *records: dict[str, Any] | str) -> None:
        status, _, err = self.try_import(*records)
        assert status == 0, err

    def finalize(self, *arguments: str) -> str:
        status, out, err = self.run("finalize", "--lake", str(self.path), *arguments)
        assert status == 0, err
        return out

    def rows(self, group_id: str | None = None) -> list[dict[str, Any]]:
        which = [] if group_id is None else ["--group", group_id]
        status, out, err = self.run("rows", "--lake", str(self.path), *which)
        assert status == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def row(self, *records: dict[str, Any] | str) -> dict[str, Any]:
        """The only row of what the records say."""
        self.take(*records)
        self.finalize("--policy", "group_deadline_s=0")
        (row,) = self.rows()
        return row

    def sql(self, query: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
        lake = tokenlake.open(self.path)
        try:
            return lake.sql(query, parameters).fetchall()
        finally:
            lake.close()

    def audit(self) -> tuple[int, list[dict[str, Any]]]:
        status, out, _ = self.run("audit", "--lake", str(self.path), "--format", "jsonl")
        return status, [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CaseLake:
    return CaseLake(tmp_path / "lake", capsys)


@pytest.fixture
def damage() -> Callable[[Path, bytes, bytes], None]:
    """Replaces bytes of one file on disk, which must be there exactly once."""

    def replace(path: Path, old: bytes, new: bytes) -> None:
        data = path.read_bytes()
        assert data.count(old) == 1
        assert len(old) == len(new)
        path.write_bytes(data.replace(old, new))

    return replace
