"""A real vLLM, twice: as a capture worker over one lake, and as it comes. `make test-vllm` sets up the interpreter.

Runs where `TOKENLAKE_TEST_VLLM_PYTHON` names an interpreter that has vLLM and this package.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import Door, Opener, opener
from tests.api.test_upstream import backend
from tokenlake.ingest.tiny.checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("TOKENLAKE_TEST_VLLM_PYTHON")
_START_S = 240
WITHOUT_A_GPU = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}
FLAGS = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
    *("--host", "127.0.0.1", "--enable-scale-out", "--enable-tokenizer-info-endpoint", "--no-enable-prefix-caching"),
    *("--enable-log-requests", "--enable-log-outputs"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if PYTHON is None:
                item.add_marker(pytest.mark.skip(reason="TOKENLAKE_TEST_VLLM_PYTHON names no interpreter with vLLM"))


@dataclass
class Served:
    """One vLLM process."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list[str])

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def kill(self) -> None:
        """As a machine that dies: the server and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextlib.contextmanager
def served(model: Path, *command: str, **environment: str) -> Iterator[Served]:
    """Run one until the block ends; `command` is what stands before vLLM's own arguments."""
    assert PYTHON is not None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen(
        [PYTHON, "-m", *command, "--model", str(model), *FLAGS, "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, **WITHOUT_A_GPU, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    made = Served(process, f"http://127.0.0.1:{port}")
    up = threading.Event()

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            made.log.append(line)
            if "Application startup complete" in line:
                up.set()
        up.set()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        assert up.wait(_START_S), "".join(made.log[-40:])
        if process.poll() is None:
            _answers(made)
        yield made
    finally:
        if process.poll() is None:
            made.stop()
        made.kill()
        reader.join(20)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _answers(made: Served) -> None:
    """Once it says so, the socket still opens a moment later: the connection is tried until it is taken."""
    transport = httpx.HTTPTransport(retries=8)
    with httpx.Client(transport=transport, timeout=60) as client:
        assert client.get(made.url + "/health").is_success, "".join(made.log[-40:])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a directory that vLLM serves."""
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Above the lake that gate and worker share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def run_worker(model: Path, root: Path) -> Callable[..., contextlib.AbstractContextManager[Served]]:
    """Starts a worker over the shared lake."""

    def run(worker_id: str, *flags: str, **environment: str) -> contextlib.AbstractContextManager[Served]:
        start = ("tokenlake.api.cli", "worker", "--with-parent", "--lake", str(root / "lake"), "--worker-id", worker_id)
        return served(model, *start, *flags, **environment)

    return run


@pytest.fixture(scope="session")
def worker(run_worker: Callable[..., contextlib.AbstractContextManager[Served]]) -> Iterator[Served]:
    with run_worker("w0") as made:
        yield made


@pytest.fixture(scope="session")
def other(run_worker: Callable[..., contextlib.AbstractContextManager[Served]]) -> Iterator[Served]:
    """A worker behind a function middleware, whose template closes no answer and leaves out what shows nothing."""
    flags = ("--middleware", "tests.vllm.middleware.nothing", "--chat-template", str(ROOT / "tests/vllm/other.jinja"))
    with run_worker("w3", *flags) as made:
        yield made


@pytest.fixture(scope="session")
def stock(model: Path) -> Iterator[Served]:
    """The same vLLM without a worker."""
    with served(model, "vllm.entrypoints.launchers.api_server.entry") as made:
        yield made


@pytest.fixture(scope="session")
def open_gate(root: Path) -> Opener:
    return opener(root)


@pytest.fixture
def door(open_gate: Opener, worker: Served) -> Iterator[Door]:
    """A gate that has the worker capture."""
    with open_gate(engine=backend(worker.url, "worker")) as made:
        yield made


_groups = itertools.count()


@pytest.fixture
def group() -> str:
    """An id of this test's own: the lake is shared."""
    return f"v{next(_groups)}"


def version(worker: Served, number: int) -> httpx.Response:
    """Label the loaded weights."""
    return httpx.put(worker.url + "/v1/tokenlake/weights", json={"version": number}, timeout=30)


def load(worker: Served) -> int:
    """Label the loaded weights with the next version: a worker's tests share it, and it never goes back."""
    label = httpx.get(worker.url + "/v1/tokenlake/capture", timeout=30).json()["weights"]
    number = int(label) + 1 if label.isdigit() else 0
    assert version(worker, number).json()["weights"] == str(number)
    return number


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Opens a gate over a lake of this test's own."""
    return opener(tmp_path)
