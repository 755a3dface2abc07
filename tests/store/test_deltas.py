"""Staging: durable at return, once for each key, shared syncs, and what happens when the disk refuses (B26)."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenlake.errors import ConfigError, Conflict, InvalidInput, LakeLocked, StorageFailed, TokenlakeError
from tokenlake.store.delta import Delta, Place
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake

Make = Callable[..., Delta]
HERE = Path(__file__).parent


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = [{str(HERE)!r}]\nfrom conftest import build_delta\n{script}"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def calls(root: Path) -> list[str]:
    with Lake(root) as lake:
        return [row[0] for row in lake.sql("SELECT call_id FROM deltas ORDER BY call_id").fetchall()]


def test_a_record_is_staged_once(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    first = writer.stage(make_delta("c0"))
    assert writer.stage(make_delta("c0", staged_at=5)) == first
    writer.close()
    again = DeltaWriter(root, "w0")
    assert again.stage(make_delta("c0")) == first
    assert again.find("g0_g0", 0, "c0") == (first, make_delta("c0").digest)
    assert again.find("g0_g0", 1, "c0") is None
    again.close()
    assert calls(root) == ["c0"]


def test_records_that_are_staged_together_each_have_their_own_outcome(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    first = writer.stage(make_delta("c0"))
    again, other, fresh, odd, twin = writer.stage_each(
        [
            make_delta("c0"),
            make_delta("c0", first=99),
            make_delta("c1"),
            make_delta("c2", attempt=2**40),
            make_delta("c1"),
        ]
    )
    assert again == first
    assert isinstance(other, Conflict)
    assert isinstance(odd, InvalidInput)
    assert isinstance(fresh, Place)
    assert twin == fresh
    assert writer.stage_each([]) == []
    writer.close()
    assert calls(root) == ["c0", "c1"]


def test_the_same_key_with_other_content_is_a_conflict(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    with pytest.raises(Conflict):
        writer.stage(make_delta("c0", first=99))
    writer.stage(make_delta("c0", attempt=1))
    writer.close()
    assert calls(root) == ["c0", "c0"]


def test_records_that_are_staged_together_share_a_sync(
    root: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    places = writer.stage_each([make_delta(f"c{i}") for i in range(1, 4)])
    assert all(isinstance(place, Place) for place in places)
    assert len(syncs) == 1
    monkeypatch.undo()
    writer.close()
    assert calls(root) == ["c0", "c1", "c2", "c3"]


def test_a_damaged_record_is_staged_again(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    place = writer.stage(make_delta("c0", n=8))
    with (root / "deltas/w0/000000.arrow").open("r+b") as file:
        file.seek(place.byte_offset + place.byte_length - 12)
        file.write(b"\x01\x02\x03\x04")
    assert writer.stage(make_delta("c0", n=8)) != place
    writer.close()
    with Lake(root) as lake:
        ids, logprobs = lake.sql("SELECT len(token_ids), logprobs FROM deltas").fetchall()[0]
        assert (ids, logprobs) == (8, [0.0] * 4 + [-0.5] * 4)


def test_sixty_four_threads_share_syncs_and_get_their_own_place(
    root: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    real = os.fdatasync

    def counted(fd: int) -> None:
        syncs.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    writer = DeltaWriter(root, "w0")
    places: dict[str, Place] = {}
    start = threading.Barrier(64)

    def work(k: int) -> None:
        start.wait()
        for i in range(10):
            places[f"t{k}c{i}"] = writer.stage(make_delta(f"t{k}c{i}", n=k))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 640
    assert len(syncs) < 640
    for call_id, place in places.items():
        assert writer.read(place).call_id == call_id
    writer.close()
    assert len(calls(root)) == 640


def test_two_threads_that_stage_the_same_record_get_the_same_place(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    found: list[Place] = []
    start = threading.Barrier(16)

    def work() -> None:
        start.wait()
        found.append(writer.stage(make_delta("c0")))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(set(found)) == 1


def test_data_is_synced_before_it_is_acknowledged(
    root: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("open", "write", "pwrite", "fdatasync", "fsync"):
        real = getattr(os, name)

        def noted(*arguments: object, real: Callable[..., object] = real, name: str = name, **more: object) -> object:
            steps.append(name)
            return real(*arguments, **more)

        monkeypatch.setattr(os, name, noted)
    writer = DeltaWriter(root, "w0")
    steps.clear()
    writer.stage(make_delta("c0"))
    # The new file: its head and its folder entry are durable before the first record is written, over zeros.
    assert steps == ["open", "write", "fsync", "open", "fsync", "pwrite", "pwrite", "pwrite", "fdatasync"]
    steps.clear()
    writer.stage(make_delta("c1"))
    assert steps == ["pwrite", "pwrite", "fdatasync"]
    writer.close()


def test_a_failed_sync_acknowledges_nothing_and_its_file_is_left_alone(
    root: Path, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    real = os.fdatasync

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(StorageFailed):
        writer.stage(make_delta("c1"))
    size = (root / "deltas/w0/000000.arrow").stat().st_size
    monkeypatch.setattr(os, "fdatasync", real)
    place = writer.stage(make_delta("c1"))
    assert place.segment == 1
    assert (root / "deltas/w0/000000.arrow").stat().st_size == size
    writer.close()
    assert calls(root) == ["c0", "c1"]
    DeltaWriter(root, "w0").close()
    assert calls(root) == ["c0", "c1"]


FULL = """
import resource
from tokenlake.errors import StorageFailed
from tokenlake.store.deltas import DeltaWriter
from pathlib import Path
writer = DeltaWriter(Path(sys.argv[1]), "w0")
writer.stage(build_delta("c0", n=500))
size = Path(sys.argv[1], "deltas/w0/000000.arrow").stat().st_size
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
try:
    writer.stage(build_delta("c1", n=20_000))
except StorageFailed as failure:
    print("refused", failure.detail["errno"])
assert writer.read(writer.stage(build_delta("c0", n=500))).call_id == "c0"
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(writer.stage(build_delta("c2", n=500)).segment, writer.stage(build_delta("c1", n=20_000)).segment)
writer.close()
"""


def test_a_full_disk_refuses_one_record_and_the_next_succeeds_without_restart(root: Path) -> None:
    done = run_script(FULL, root)
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "27", "1", "1"]), done.stderr
    assert calls(root) == ["c0", "c1", "c2"]
    with OwnedLake.open(root) as lake:
        assert lake.sql("SELECT call_id FROM deltas ORDER BY 1").fetchall() == [("c0",), ("c1",), ("c2",)]


KILLED = """
from tokenlake.store.deltas import DeltaWriter
from pathlib import Path
writer = DeltaWriter(Path(sys.argv[1]), "w0")
for i in range(100_000):
    writer.stage(build_delta(f"c{i:06d}", n=64))
    print(i, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_acknowledged(root: Path, make_delta: Make) -> None:
    code = f"import sys; sys.path[:0] = [{str(HERE)!r}]\nfrom conftest import build_delta\n{KILLED}"
    with subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(50)]
        process.kill()
        acknowledged += [int(line) for line in process.stdout.read().split("\n") if line]
    writer = DeltaWriter(root, "w0")
    found = calls(root)
    expected = [f"c{i:06d}" for i in acknowledged]
    assert found[: len(expected)] == expected
    assert len(found) <= len(expected) + 1
    writer.stage(make_delta(expected[-1], n=64))
    writer.close()
    assert calls(root) == found


def test_a_writer_name_has_one_process(root: Path) -> None:
    writer = DeltaWriter(root, "w0")
    with pytest.raises(LakeLocked) as refused:
        DeltaWriter(root, "w0")
    assert refused.value.detail["pid"] == os.getpid()
    writer.close()
    DeltaWriter(root, "w0").close()


@pytest.mark.parametrize("name", ["", "..", "a/b", ".x", "a\0"])
def test_a_writer_name_is_never_a_path(root: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        DeltaWriter(root, name)


@pytest.mark.parametrize("names", [{"rollout_id": ""}, {"rollout_id": "g0\0_g0"}, {"call_id": ""}, {"call_id": "c\0"}])
def test_what_no_reader_would_take_for_a_record_is_refused(root: Path, make_delta: Make, names: dict[str, str]) -> None:
    writer = DeltaWriter(root, "w0")
    call_id = names.get("call_id", "c0")
    with pytest.raises(InvalidInput, match="a name that is no key"):
        writer.stage(make_delta(call_id, **{k: v for k, v in names.items() if k != "call_id"}))
    writer.stage(make_delta("c1"))
    writer.close()
    assert calls(root) == ["c1"]


def test_a_closed_writer_refuses(root: Path, make_delta: Make) -> None:
    writer = DeltaWriter(root, "w0")
    writer.close()
    writer.close()
    with pytest.raises(TokenlakeError, match="closed"):
        writer.stage(make_delta())


def test_what_is_staged_while_the_writer_is_closed_is_there_or_refused(
    root: Path, make_delta: Make, while_closing: Callable[..., Place]
) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    assert while_closing(writer.close, lambda: writer.stage(make_delta("c1"))).segment == 0
    writer._closed = False  # as for a call that looked before
    with pytest.raises(StorageFailed, match="was closed meanwhile"):
        writer.stage(make_delta("c2"))
    assert calls(root) == ["c0", "c1"]


def test_what_an_interrupt_left_is_never_written_over(
    root: Path, make_delta: Make, interrupted: Callable[..., None]
) -> None:
    writer = DeltaWriter(root, "w0")
    writer.stage(make_delta("c0"))
    interrupted(lambda: writer.stage(make_delta("c1")))
    with Lake(root) as reader:
        assert calls(root) == ["c0", "c1"]
        writer.stage(make_delta("c2", n=400))
        writer.stage(make_delta("c3"))
        reader.refresh()
        for sealed in (False, True):
            said = reader.sql("SELECT call_id FROM deltas ORDER BY ALL").fetchall()
            assert said == [("c0",), ("c1",), ("c2",), ("c3",)], sealed
            assert reader.sql("SELECT * FROM lake_findings").fetchall() == []
            writer.close()
            reader.refresh()
