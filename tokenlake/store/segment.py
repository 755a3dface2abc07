"""Segments: Arrow IPC files that are appended to, one writer each.

An append is data, then `fdatasync`, then the acknowledgement. Sealing appends the footer. A write or sync that fails
acknowledges nothing, and its file is never appended to again: the next append begins a new one, and what was written in
vain is made unreadable.

On a disk of this machine a segment is written ahead: it ends with zeros, in whose place its next messages go. A sync of
bytes that a file had before takes half as long as one that makes it longer. No byte of a message is ever written twice
but the first four, which are zero until all others are there: so who looks on finds a message whole or not at all. The
length that follows is there before: without it, they would be the end of a stream for as long as it takes to write it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tokenlake.errors import StorageFailed
from tokenlake.store.footer import END_OF_STREAM, Block, Footer
from tokenlake.store.mounts import is_local
from tokenlake.store.walk import HEAD

__all__ = [
    "APPEND_MAX_BYTES",
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
    "write_at",
]

SEGMENT_MAX_BYTES = 256 << 20
SEGMENT_MAX_ELEMENTS = 2**31 - 1
APPEND_MAX_BYTES = 4 << 20
"""Of the messages that share a sync, unless it is one that is larger: a loss of power takes no more."""
FLOOR = "floor"
"""A file beside segments: the lowest number that is free, written down before the segment of the highest is removed."""

_BLANK = bytes(4)
"""In place of the first bytes of a message, which does not begin as one then."""
_LEAST_AHEAD = 1 << 16
_MOST_AHEAD = 1 << 20
"""Zeros, in bytes, that a segment is written ahead by; between these bounds as many as it has."""
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


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte at an offset, or raise `OSError`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


class SegmentWriter:
    """Appends messages to the newest segment of a directory. Not thread-safe: its caller takes turns.

    `max_bytes` and `max_elements` bound a segment; a single larger message gets its own. Of several messages in one
    append a loss of power takes any: those that follow from each other are one.
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
        self._ahead = is_local(directory)
        self._next = next_number(directory)
        self._fd = -1
        self._segment = -1
        self._size = 0
        self._length = 0
        """Of the file, zeros included."""
        self._elements = 0
        self._blocks: list[Block] = []
        self._appending = False

    @property
    def position(self) -> tuple[int, int]:
        """(segment, bytes) up to which everything is durable; segment -1: nothing was written yet."""
        return self._segment, self._size

    def append(self, messages: Sequence[Message]) -> list[tuple[int, int] | StorageFailed]:
        """Make messages durable; (segment, offset) of each, or why it is not. One sync for each segment touched."""
        self._leave_interrupted()
        self._appending = True
        done: list[tuple[int, int] | StorageFailed] = []
        while len(done) < len(messages):
            start = stop = len(done)
            try:
                self._ready(*messages[start])
                size, elements = self._size, self._elements
                while stop < len(messages) and (stop == start or self._joins(size, elements, messages[stop])):
                    size += len(messages[stop][0])
                    elements += messages[stop][1]
                    stop += 1
                self._put([message for message, _ in messages[start:stop]])
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
        self._appending = False
        return done

    def seal(self) -> None:
        """Write the footer and let go of the file. A failure costs nothing: an unsealed segment is recovered later."""
        self._leave_interrupted()
        self._seal()

    def _leave_interrupted(self) -> None:
        """Never write again where an interrupt ended an append: somebody may have read what it wrote."""
        if self._appending:
            self._drop()
        self._appending = False

    def _seal(self) -> None:
        if self._fd < 0:
            return
        try:
            # Zeros that found no room may end anywhere.
            end = -(-os.fstat(self._fd).st_size // 8) * 8
            if self._size < end:
                # The footer is found from the end of the file, which may be mapped and is not cut: the zeros stay.
                write_at(self._fd, END_OF_STREAM, self._size)
                os.fdatasync(self._fd)
            write_at(self._fd, self._footer.closing(self._blocks), max(self._size, end))
            os.fdatasync(self._fd)
        except OSError as error:
            _log.warning("segment %s was not sealed (%s); it is whole and will be recovered", self._path(), error)
        self._drop()

    def _path(self) -> Path:
        return self.directory / f"{self._segment:06d}.arrow"

    def _fits(self, size: int, elements: int, message: Message) -> bool:
        return size + len(message[0]) <= self._max_bytes and elements + message[1] <= self._max_elements

    def _joins(self, size: int, elements: int, message: Message) -> bool:
        """Whether a message shares its sync with others that end at `size`."""
        return self._fits(size, elements, message) and size + len(message[0]) <= self._size + APPEND_MAX_BYTES

    def _ready(self, data: bytes, elements: int) -> None:
        if self._fd >= 0 and self._blocks and not self._fits(self._size, self._elements, (data, elements)):
            self._seal()
        if self._fd >= 0:
            return
        self._segment = self._next
        self._next += 1
        self._fd = os.open(self._path(), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        write_all(self._fd, self._head)
        os.fsync(self._fd)
        sync_directory(self.directory)
        self._size = self._length = len(self._head)
        self._elements, self._blocks = 0, []

    def _put(self, messages: Sequence[bytes]) -> None:
        """Write messages behind what is there, the first bytes of each last."""
        if not self._ahead:
            write_at(self._fd, messages[0] if len(messages) == 1 else b"".join(messages), self._size)
            return
        end = self._size + sum(map(len, messages))
        pieces = [piece for message in messages for piece in (_BLANK, memoryview(message)[len(_BLANK) :])]
        body = pieces[1] if len(messages) == 1 else b"".join(pieces)[len(_BLANK) :]
        write_at(self._fd, body, self._size + len(_BLANK))
        if end > self._length:
            self._go_ahead(end)
        offset = self._size
        for message in messages:
            write_at(self._fd, message[: len(_BLANK)], offset)
            offset += len(message)

    def _go_ahead(self, end: int) -> None:
        """Zeros from `end` on, within the bound of the segment."""
        zeros = min(max(self._size, _LEAST_AHEAD), _MOST_AHEAD)
        upto = min(end + zeros, max(self._max_bytes & ~7, end))
        # A disk without room for them has it for the messages, which are there.
        with contextlib.suppress(OSError):
            write_at(self._fd, bytes(upto - end), end)
        self._length = os.fstat(self._fd).st_size

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
                        os.pwrite(fd, _BLANK, offset)
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
