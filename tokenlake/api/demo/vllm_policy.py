"""A capture worker for the demo: real vLLM, in a process of its own, that serves the embedded model's weights.

Its trace is vLLM's own log, in which the serving layer writes down the ids of every prompt and answer; it has no
log-probabilities, so the weights alone are witness to those.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tokenlake.api.backend import Backend, upstream_backend
from tokenlake.api.demo.policy import State, Traced
from tokenlake.api.settings import Settings, child_environment, read_environment
from tokenlake.errors import ConfigError
from tokenlake.ingest.capture_ask import CAPTURE_PATH, WEIGHTS_PATH
from tokenlake.ingest.tiny import load_model
from tokenlake.ingest.tiny.checkpoint import write_checkpoint, write_weights
from tokenlake.ingest.tiny.engine import WEIGHTS_DIR

__all__ = ["VllmPolicy", "read_log", "vllm_policy"]

_START_S = 300.0
_STOP_S = 30.0
_DEADLINE_S = 60.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Routes that a trainer in another process reloads weights by.
    "VLLM_SERVER_DEV_MODE": "1",
    # A model this small loses more by compiling and by waiting for threads than it gains.
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_FLAGS = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
    *("--host", "127.0.0.1"),
)
_TRACING = ("--enable-log-requests", "--enable-log-outputs")
"""With these and at level DEBUG the log has every prompt and answer as ids."""
_PROMPT = re.compile(r"Request chatcmpl-(\S+) details: prompt: .*, prompt_token_ids: \[([\d, ]*)\], prompt_embeds")
_ANSWER = re.compile(r"Generated response chatcmpl-(\S+) details: output_token_ids: \[([\d, ]*)\]")


class VllmPolicy:
    """One worker that runs at `url`; `vllm_policy` starts and stops it."""

    def __init__(self, url: str, model: Path, log: Path) -> None:
        self.url = url
        self._model = model
        self._log = log
        self._weights: State = dict(load_model(WEIGHTS_DIR).state_dict())
        self.backend: Backend = asyncio.run(upstream_backend(url, "worker", Settings(), read_environment()))
        version = httpx.get(f"{url}/version", timeout=_DEADLINE_S).json()["version"]
        self.title = f"vLLM {version} with the embedded model's weights, captured inside the serving process"

    @property
    def weights(self) -> State:
        """As they were last loaded."""
        return self._weights

    async def load(self, state: State, version: int) -> None:
        """By the routes that vLLM has for it: pause, reload, label, resume."""
        await asyncio.to_thread(write_weights, self._model, state)
        async with httpx.AsyncClient(base_url=self.url, timeout=_DEADLINE_S) as worker:

            async def ask(method: str, path: str, body: Mapping[str, Any]) -> None:
                (await worker.request(method, path, json=body)).raise_for_status()

            await ask("POST", "/pause?mode=wait&clear_cache=true", {})
            await ask("POST", "/collective_rpc", {"method": "reload_weights"})
            await ask("PUT", WEIGHTS_PATH, {"version": version})
            await ask("POST", "/resume", {})
        self._weights = state

    def traced(self) -> Mapping[str, Traced]:
        """From vLLM's log. An answer without text is not in it."""
        return read_log(self._log.read_text(encoding="utf-8", errors="replace"))


def read_log(text: str) -> dict[str, Traced]:
    """The captured calls that a log of vLLM at level DEBUG, with requests and outputs, speaks of; by call id."""
    answers = {call: _ids(found) for call, found in _ANSWER.findall(text)}
    return {
        call: Traced(prompt_token_ids=_ids(prompt), token_ids=answers.get(call), logprobs=None)
        for call, prompt in _PROMPT.findall(text)
    }


@contextlib.contextmanager
def vllm_policy(python: str, lake: Path, folder: Path, *, trace: bool = True) -> Generator[VllmPolicy]:
    """Start a worker over a lake with an interpreter that has vLLM, and stop it when the block ends.

    Without `trace` its log says nothing of calls. Raises `ConfigError` with the end of its log where it does not come
    up.
    """
    model, log = folder / "model", folder / "vllm.log"
    write_checkpoint(model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python, "-m", "tokenlake.api.cli", "worker", "--with-parent", "--lake", str(lake), "--model", str(model)]
    command += [*_FLAGS, "--port", str(port), *(_TRACING if trace else ())]
    environment = child_environment() | _ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "DEBUG" if trace else "INFO"}
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(  # noqa: S603 - the interpreter that the user named
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise ConfigError(f"cannot run {python}: {error.strerror}") from error
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield VllmPolicy(f"http://127.0.0.1:{port}", model, log)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + CAPTURE_PATH, timeout=_DEADLINE_S).is_success:
                return
        time.sleep(0.2)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
    raise ConfigError(f"vLLM did not come up; its last words: {' | '.join(said) or 'none'}")


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
