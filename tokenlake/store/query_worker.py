"""`python -m tokenlake.store.query_worker LAKE MEMORY_BYTES`: answers queries in a process of their own.

A query can run for ever or take all memory inside one function call, where nothing interrupts it: so a stranger's query
runs where the kernel bounds its memory and whoever asked can kill it. One JSON line in, `{"id", "sql", "params",
"max_rows", "max_bytes"}`, gives one JSON line out, `{"id", "rows", "more", "bytes"}`, followed by as many bytes of an
Arrow stream, or `{"id", "error", "kind"}`. `{"cancel": id}` interrupts that query. The end of standard input ends the
process, also in the middle of a query.
"""

from __future__ import annotations

import json
import os
import queue
import re
import resource
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa

from tokenlake.errors import TokenlakeError
from tokenlake.store.query import run_query
from tokenlake.store.reader import Lake

__all__ = ["Worker", "main"]

_BATCH_ROWS = 256
_LINE = 2000


class Worker:
    """One lake, one query at a time."""

    def __init__(self, lake: Lake, answers: BinaryIO) -> None:
        self._lake = lake
        self._answers = answers
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._running: tuple[int, duckdb.DuckDBPyConnection] | None = None

    def listen(self, requests: BinaryIO) -> None:
        """Take requests until there are no more, then end the process."""
        for line in requests:
            request = json.loads(line)
            if "cancel" not in request:
                self._requests.put(request)
                continue
            with self._guard:
                if self._running is not None and self._running[0] == request["cancel"]:
                    self._running[1].interrupt()
        os._exit(0)

    def run(self) -> None:
        """Answer requests for ever."""
        self._say({"ready": True})
        while True:
            request = self._requests.get()
            try:
                stream, rows, more = self._query(request)
            except duckdb.InterruptException:
                self._say({"id": request["id"], "error": "the query was interrupted", "kind": "interrupted"})
            except (duckdb.OutOfMemoryException, MemoryError, pa.ArrowMemoryError):
                self._say({"id": request["id"], "error": "the query takes too much memory", "kind": "memory"})
            except (duckdb.Error, pa.ArrowException) as error:
                self._say({"id": request["id"], "error": f"the query cannot run: {_line(error)}", "kind": "query"})
            except TokenlakeError as error:
                self._say({"id": request["id"], "error": _line(error), "kind": "query"})
            else:
                self._say({"id": request["id"], "rows": rows, "more": more, "bytes": len(stream)}, stream)

    def _query(self, request: dict[str, Any]) -> tuple[bytes, int, bool]:
        """The answer as an Arrow stream, its rows, and whether there were more."""
        self._lake.refresh()
        con = self._lake.locked_cursor(request["sql"])
        with self._guard:
            self._running = (request["id"], con)
        try:
            relation: Any = run_query(con, request["sql"], request["params"] or None)
            return _bounded(relation.to_arrow_reader(_BATCH_ROWS), request["max_rows"], request["max_bytes"])
        finally:
            with self._guard:
                self._running = None
            con.close()

    def _say(self, head: dict[str, Any], stream: bytes = b"") -> None:
        self._answers.write(json.dumps(head).encode() + b"\n" + stream)
        self._answers.flush()


def _bounded(reader: pa.RecordBatchReader, max_rows: int, max_bytes: int) -> tuple[bytes, int, bool]:
    sink = pa.BufferOutputStream()
    rows, more = 0, False
    with pa.ipc.new_stream(sink, reader.schema) as writer:
        for batch in reader:
            taken = batch.slice(0, max_rows - rows)
            size = pa.ipc.get_record_batch_size(taken)
            while taken.num_rows and sink.tell() + size > max_bytes:
                taken = taken.slice(0, taken.num_rows // 2)
                size = pa.ipc.get_record_batch_size(taken)
            if taken.num_rows:
                writer.write_batch(taken)
                rows += taken.num_rows
            if taken.num_rows < batch.num_rows:
                more = True
                break
    return sink.getvalue().to_pybytes(), rows, more


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:_LINE]


def _data_bytes() -> int:
    """What this process has mapped for data: allocators reserve a good deal at the start."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"VmData:\s+(\d+) kB", status)[0]) * 1024


def main(path: str, memory_bytes: int) -> None:
    """Serve the lake at `path` over the standard streams."""
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = Worker(Lake(path, memory_bytes=memory_bytes), answers)
    bound = _data_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    threading.Thread(target=worker.listen, args=(sys.stdin.buffer,), daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
