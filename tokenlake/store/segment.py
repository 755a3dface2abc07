"""Segments: Arrow IPC files that are appended to, one writer each.

An append is data, then `fdatasync`, then the acknowledgement. Sealing appends the footer. A write or sync that fails
acknowledges nothing, and its file is never appended to again: the next append begins a new one, and what was written in
vain is made unreadable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tokenlake.errors import StorageFailed
from tokenlake.store.footer import Block, Footer
from tokenlake.store.walk import HEAD

__all__ = [
    "FLOOR",
    "SEGMENT_MAX_BYTES",
    "SEGMENT_MAX_ELEMENTS",
    "Message",
    "SegmentWriter",
    "make_directory",
    "next_number",
    "segment_numbers",
    "sync_directory",
    "write_all",
]

SEGMENT_MAX_BYTES = 256 << 20
SEGMENT_MAX_ELEMENTS = 2**31 - 1
FLOOR = "floor"
"""A file beside segments: the lowest number that is free, written down before the segment of the highest is removed."""

_REFUSED = bytes(8)
"""Over the first bytes of a message, which no longer begins as one then."""
_log = logging.getLogger(__name__)

Message = tuple[bytes, int]
"""An encoded IPC message, and the elements of its longest list column."""


def sync_directory(path: Path) -> None:
    """Make a new or renamed directory entry durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create a folder durably, with those above it, unless it is there."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments in a directory, ascending."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    return sorted(int(name[:-6]) for name in names if name.endswith(".arrow") and name[:-6].isdigit())


def next_number(directory: Path) -> int:
    """The number of the next segment: none is ever given twice, whatever was removed."""
    numbers = segment_numbers(directory)
    try:
        floor = int((directory / FLOOR).read_bytes())
    except FileNotFoundError:
        floor = 0
    return max(floor, numbers[-1] + 1 if numbers else 0)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte, or raise `OSError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class SegmentWriter:
    """Appends messages to the newest segment of a directory. Not thread-safe: its caller takes turns.

    `max_bytes` and `max_elements` bound a segment; a single larger message gets its own.
    """

    def __init__(
        self,
        directory: Path,
        schema: pa.Schema,
        *,
        max_bytes: int = SEGMENT_MAX_BYTES,
        max_elements: int = SEGMENT_MAX_ELEMENTS,
    ) -> None:
        self.directory = directory
        self._head = HEAD + schema.serialize().to_pybytes()
        self._footer = Footer(schema)
        self._max_bytes = max_bytes
        self._max_elements = max_elements
        self._next = next_number(directory)
        self._fd = -1
        self._segment = -1
        self._size = 0
        self._elements = 0
        self._blocks: list[Block] = []

    @property
    def position(self) -> tuple[int, int]:
        """(segment, bytes) up to which everything is durable; segment -1: nothing was written yet."""
        return self._segment, self._size

    def append(self, messages: Sequence[Message]) -> list[tuple[int, int] | StorageFailed]:
        """Make messages durable; (segment, offset) of each, or why it is not. One sync for each segment touched."""
        done: list[tuple[int, int] | StorageFailed] = []
        while len(done) < len(messages):
            start = stop = len(done)
            try:
                self._ready(*messages[start])
                size, elements = self._size, self._elements
                while stop < len(messages) and (stop == start or self._fits(size, elements, messages[stop])):
                    size += len(messages[stop][0])
                    elements += messages[stop][1]
                    stop += 1
                data = messages[start][0] if stop == start + 1 else b"".join([m[0] for m in messages[start:stop]])
                write_all(self._fd, data)
                os.fdatasync(self._fd)
            except OSError as error:
                self._disown([len(message) for message, _ in messages[start:stop]])
                done += [self._failed(error)] * (len(messages) - start)
                break
            offset = self._size
            for message, _ in messages[start:stop]:
                meta = 8 + int.from_bytes(message[4:8], "little")
                self._blocks.append((offset, meta, len(message) - meta))
                done.append((self._segment, offset))
                offset += len(message)
            self._size, self._elements = size, elements
        return done

    def seal(self) -> None:
        """Write the footer and let go of the file. A failure costs nothing: an unsealed segment is recovered later."""
        if self._fd < 0:
            return
        try:
            write_all(self._fd, self._footer.closing(self._blocks))
            os.fdatasync(self._fd)
        except OSError as error:
            _log.warning("segment %s was not sealed (%s); it is whole and will be recovered", self._path(), error)
        self._drop()

    def _path(self) -> Path:
        return self.directory / f"{self._segment:06d}.arrow"

    def _fits(self, size: int, elements: int, message: Message) -> bool:
        return size + len(message[0]) <= self._max_bytes and elements + message[1] <= self._max_elements

    def _ready(self, data: bytes, elements: int) -> None:
        if self._fd >= 0 and self._blocks and not self._fits(self._size, self._elements, (data, elements)):
            self.seal()
        if self._fd >= 0:
            return
        self._segment = self._next
        self._next += 1
        self._fd = os.open(self._path(), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        write_all(self._fd, self._head)
        os.fsync(self._fd)
        sync_directory(self.directory)
        self._size, self._elements, self._blocks = len(self._head), 0, []

    def _disown(self, lengths: Sequence[int]) -> None:
        """Make refused messages unreadable in place, so that no restart takes for acknowledged what was not.

        Nothing is cut off: somebody may have mapped the file. A disk that refuses this too keeps bytes that the next
        segment of a lineage log begins before.
        """
        if not lengths:
            return
        try:
            fd = os.open(self._path(), os.O_WRONLY | os.O_CLOEXEC)
            try:
                offset, end = self._size, os.fstat(fd).st_size
                for length in lengths:
                    if offset < end:
                        os.pwrite(fd, _REFUSED, offset)
                    offset += length
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            _log.warning("refused records of %s could not be marked: %s", self._path(), error)

    def _failed(self, error: OSError) -> StorageFailed:
        path = self._path()
        self._drop()
        return StorageFailed(
            f"{path} could not be written ({error.strerror or error}); nothing was acknowledged: free space or check "
            "the disk, then try again",
            errno=error.errno,
        )

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
