"""Objects: files that are written whole and never changed, in a folder of any file system that pyarrow reaches.

An object store shows an object once it is complete. Elsewhere a file is written beside its place, synced where the
folder is on this machine, and moved into it. What is read can be held against its SHA-256. Errors say where and what to
do, and hold no part of an address that may be a secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from tokenlake.errors import ConfigError, DamagedLake, NotFound, StorageFailed, Unauthorized
from tokenlake.store.segment import sync_directory

__all__ = ["Objects", "sha256_of"]

_WHOLE = ("s3", "gcs", "abfs")
"""File systems that show an object only once it is complete."""
_PART = ".part-"
_REFUSED = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "EXPIRED_TOKEN",
    "HTTP response code 403",
)


class Objects:
    """A folder of objects, there or not. Picklable, thread-safe.

    `uri`: `s3://bucket/folder`, `gs://...`, `abfs://...`, `file:///...`, `fsspec+<protocol>://...` or a folder, with
    what options pyarrow takes; or a path of `filesystem`. Raises `ConfigError` for what pyarrow does not know, and what
    `put` does.
    """

    def __init__(self, uri: str | os.PathLike[str], filesystem: fs.FileSystem | None = None) -> None:
        self.name = path = os.fspath(uri)
        found: Any = filesystem
        if found is None:
            address = urlsplit(path)
            if address.scheme:
                self.name = f"{address.scheme}://{address.hostname or ''}{address.path}"
            else:
                path = str(Path(path).absolute())
            try:
                # Where the address names no region of S3, the bucket is asked for it.
                with self._told(f"{self.name} could not be reached"):
                    found, path = fs.FileSystem.from_uri(path)
            except (ValueError, NotImplementedError, ImportError) as error:
                # Not `from error`: what pyarrow says may quote a secret out of the address.
                said = str(error).replace(os.fspath(uri), self.name)
                raise ConfigError(f"{self.name} names no file system that pyarrow reaches: {said}") from None
        while isinstance(found, fs.SubTreeFileSystem):
            path, found = f"{found.base_path.rstrip('/')}/{path.lstrip('/')}", found.base_fs
        self._fs = found
        self._path = path.rstrip("/")

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """Write an object: it is there whole or not at all.

        Raises `NotFound` for a bucket that is not there, `Unauthorized` or `StorageFailed` where the store refuses.
        """
        path = f"{self._path}/{name}"
        with self._told(f"{self.name}/{name} could not be written"):
            if self._fs.type_name in _WHOLE:
                self._write(path, data)
                return
            folder = path.rpartition("/")[0]
            self._fs.create_dir(folder, recursive=True)
            part = f"{path}{_PART}{uuid.uuid4().hex}"
            local = self._fs.type_name == "local"
            moved = False
            try:
                self._write(part, data)
                if local:
                    _sync(part)
                self._fs.move(part, path)
                moved = True
            finally:
                if not moved:
                    # Who tries again for hours would fill what little room there is.
                    with contextlib.suppress(OSError):
                        self._fs.delete_file(part)
            if local:
                sync_directory(Path(folder))

    def get(self, name: str, sha256: str) -> pa.Buffer:
        """The bytes of an object that was put. Raises `DamagedLake` where it is gone, or has another SHA-256."""
        place = f"{self.name}/{name}"
        try:
            with self._told(f"{place} could not be read"), self._fs.open_input_file(f"{self._path}/{name}") as file:
                data: pa.Buffer = file.read_buffer()
        except NotFound as error:
            raise DamagedLake(f"{place} is gone, and the catalog there names it", place=place) from error
        if sha256_of(data) != sha256:
            raise DamagedLake(f"{place} is not what was written there: it has another SHA-256", place=place)
        return data

    def names(self, folder: str) -> list[str]:
        """The names of the objects in a folder, in order; none where there is no folder."""
        with self._told(f"{self.name}/{folder} could not be listed"):
            selector = fs.FileSelector(f"{self._path}/{folder}", allow_not_found=True)
            found: list[Any] = self._fs.get_file_info(selector)
        return sorted(each.base_name for each in found if each.type == fs.FileType.File and _PART not in each.base_name)

    def _write(self, path: str, data: pa.Buffer | bytes) -> None:
        # In one call: a stream that is left half-written by an error of ours closes, and would show what it has.
        with self._fs.open_output_stream(path) as out:
            out.write(data)

    @contextlib.contextmanager
    def _told(self, what: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{what}: it is not there", place=self.name) from error
        except OSError as error:
            said = str(error)
            if "NO_SUCH_BUCKET" in said:
                raise NotFound(f"{what}: there is no such bucket; make it first", place=self.name) from error
            if isinstance(error, PermissionError) or any(word in said for word in _REFUSED):
                raise Unauthorized(
                    f"{what}: it is refused to these credentials, or to none (pyarrow finds them where the SDK does)",
                    place=self.name,
                ) from error
            raise StorageFailed(f"{what}: {said}", place=self.name) from error


def sha256_of(data: pa.Buffer | bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
