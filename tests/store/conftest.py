"""Empty lakes, and deltas to stage, with true digests."""

import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenlake.store.delta import Delta
from tokenlake.store.digest import ArrayBytes, chain_hash, delta_digest, extras_digest
from tokenlake.store.format import create_lake
from tokenlake.store.lake import OwnedLake


def build_delta(
    call_id: str = "c0",
    rollout_id: str = "g0_g0",
    attempt: int = 0,
    n: int = 4,
    first: int = 10,
    **changes: object,
) -> Delta:
    """A root of `n` tokens counting up from `first`, the second half sampled."""
    ids = struct.pack(f"<{n}i", *range(first, first + n))
    mask = bytes([0] * (n // 2) + [1] * (n - n // 2))
    logprobs = struct.pack(f"<{n}f", *[0.0] * (n // 2), *[-0.5] * (n - n // 2))
    arrays = [ArrayBytes(n, raw) for raw in (ids, mask, logprobs)]
    chain = chain_hash(None, arrays[0])
    digest = delta_digest(
        schema_version=1,
        rollout_id=rollout_id,
        attempt=attempt,
        call_id=call_id,
        parent_call_id=None,
        mode="text",
        prev_len=0,
        cum_len=n,
        weight_version=4,
        weight_version_end=4,
        finish_reason="stop",
        sampling=(1.0, None, 20, "raw"),
        extras_digest=extras_digest(None),
        chain_hash=chain,
        token_ids=arrays[0],
        token_mask=arrays[1],
        logprobs=arrays[2],
    )
    values: dict[str, object] = {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "call_id": call_id,
        "parent_call_id": None,
        "root_call_id": call_id,
        "depth": 0,
        "mode": "text",
        "prev_len": 0,
        "cum_len": n,
        "token_ids": ids,
        "token_mask": mask,
        "logprobs": logprobs,
        "weight_version": 4,
        "weight_version_end": 4,
        "finish_reason": "stop",
        "sampling": (1.0, None, 20, "raw"),
        "extras": None,
        "extras_digest": extras_digest(None),
        "chain_hash": chain,
        "digest": digest,
        "staged_at": 1_700_000_000_000_000,
    }
    return Delta(**{**values, **changes})


@pytest.fixture
def make_delta() -> Callable[..., Delta]:
    return build_delta


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Does something that Ctrl-C ends as it comes nearly always: while the sync is waited for."""
    real = os.fdatasync

    def sync(fd: int) -> None:
        real(fd)
        raise KeyboardInterrupt

    def do(something: Callable[[], object]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", sync)
            with pytest.raises(KeyboardInterrupt):
                something()

    return do


@pytest.fixture
def while_closing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], Callable[[], object]], object]:
    """Does something in whose sync another thread begins to close, which has to wait; returns what it came to."""
    real = os.fdatasync

    def do(close: Callable[[], object], something: Callable[[], object]) -> object:
        closing = threading.Thread(target=close)
        waited: list[bool] = []

        def sync(fd: int) -> None:
            real(fd)
            if closing.ident is None:
                closing.start()
                closing.join(0.2)  # long enough for a close that does not wait
                waited.append(closing.is_alive())

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", sync)
            done = something()
            closing.join()
        assert waited == [True], "the name was let go of while something was written under it"
        return done

    return do


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty lake that nobody has open."""
    create_lake(tmp_path / "lake")
    return tmp_path / "lake"


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[OwnedLake]:
    owned = OwnedLake.open(tmp_path / "lake")
    yield owned
    owned.close()
