"""Capture workers as Ray actors: each starts `tokenlake worker` on the node and the GPUs that Ray gave it.

An actor holds one worker process and nothing of its own: what is captured, checked and failed is what it would be
without Ray. The lake's folder has to be the same one on every node: a shared file system. A worker ends with its actor,
also when that is killed; an actor that Ray starts again has a worker at another address, of the same name.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self, cast

from tokenlake.actors import actor_of, answer, end, join, node_address
from tokenlake.errors import ConfigError, Conflict, EngineFailed
from tokenlake.ingest.capture_ask import CAPTURE_PATH, WEIGHTS_PATH
from tokenlake.ingest.versions import version_of

__all__ = ["WorkerFleet"]

_LOOK_S = 0.2
_ASK_S = 30.0
_APART = ("/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & wait', "sh")
"""Runs what follows as a process of its own that has the shell's input; ends when it does."""


class WorkerFleet:
    """Some workers over one lake. Used by one thread at a time.

    `path`: the lake's folder, as every node sees it. `workers`: how many; they are `worker-0`, `worker-1`, ...
    `arguments`: those of `tokenlake worker` but for the lake, the id, the host and the port. `options`: Ray's options
    for each actor (`num_gpus`, `resources`, `runtime_env`, ...). `python`: an interpreter of every node that has what
    `arguments` ask for. `key`: what vLLM takes as its API key. `deadline_s`: the longest that a worker may take to come
    up. Without a running Ray it joins the one of `RAY_ADDRESS` or of this machine; raises `ConfigError` where there is
    none, or where a worker does not come up.
    """

    def __init__(
        self,
        path: Path,
        *,
        workers: int,
        arguments: Sequence[str],
        options: Mapping[str, Any] | None = None,
        python: str = sys.executable,
        key: str | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        if workers < 1:
            raise ConfigError("a fleet has at least 1 worker")
        join()
        self._deadline_s = deadline_s
        made = actor_of(HostedWorker, options)
        command = [python, "-m", "tokenlake.api.cli", "worker", "--with-parent", "--lake", str(path.absolute())]
        self._actors: dict[str, Any] = {
            name: made.remote([*command, "--worker-id", name, *arguments], key, deadline_s)
            for name in (f"worker-{number}" for number in range(workers))
        }
        self.addresses()

    def addresses(self) -> dict[str, str]:
        """Where each worker listens, by its name: what the gate registers. Raises as `set_weight_version`."""
        return self._each(lambda actor: actor.address.remote())

    def set_weight_version(self, version: int) -> dict[str, int | None]:
        """Label the weights that every worker has loaded; what each says then.

        Raises `Conflict` where one has a newer version already, `EngineFailed` for a worker that is gone, and
        `Deadline` for one that does not answer.
        """
        return self._each(lambda actor: actor.set_weight_version.remote(version))

    def weight_versions(self) -> dict[str, int | None]:
        """Which weights each worker has loaded; None is unknown. Raises as `set_weight_version`."""
        return self._each(lambda actor: actor.weight_version.remote())

    def close(self) -> None:
        """End the workers and their actors. Idempotent."""
        end(self._actors.values())
        self._actors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, ask: Callable[[Any], Any]) -> dict[str, Any]:
        """Ask all at once."""
        waiting = {name: ask(actor) for name, actor in self._actors.items()}
        return {name: answer(each, f"worker {name}", self._deadline_s) for name, each in waiting.items()}


class HostedWorker:
    """What an actor does: it holds one worker process, which lives no longer than it."""

    def __init__(self, command: list[str], key: str | None, deadline_s: float) -> None:
        self._command = command
        self._key = key
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._listens = ("", 0)

    def address(self) -> str:
        """Where the worker listens; starts it where none runs. Raises `ConfigError` where it does not come up."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return "http://{}:{}".format(*self._listens)

    def weight_version(self) -> int | None:
        """Which weights the worker has loaded."""
        return version_of(self._ask("GET", CAPTURE_PATH)["weights"])

    def set_weight_version(self, version: int) -> int | None:
        """Label them. Raises `Conflict` where they are newer already."""
        return version_of(self._ask("PUT", WEIGHTS_PATH, {"version": version})["weights"])

    def _start(self) -> None:
        """The process writes where the actor does: Ray keeps it with the actor's log."""
        host = node_address()
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        self._listens = (host, port)
        command = [*self._command, "--host", host, "--port", str(port)]
        secret = {} if self._key is None else {"VLLM_API_KEY": self._key}
        # Ray kills an actor's own children at once, and vLLM would leave its engine behind: so the worker is a child's
        # child, which ends in order when its input does. A session of its own, so that all of it can be ended at once.
        self._process = process = subprocess.Popen(  # noqa: S603 - the command that the fleet was given
            [*_APART, *command], stdin=subprocess.PIPE, env={**os.environ, **secret}, start_new_session=True
        )
        until = time.monotonic() + self._deadline_s
        while process.poll() is None and time.monotonic() < until:
            try:
                self._ask("GET", CAPTURE_PATH)
                return
            except EngineFailed:
                time.sleep(_LOOK_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise ConfigError(f"a worker on {host} did not come up: Ray's log of its actor says why (`ray logs actor`)")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        host, port = self._listens
        connection = HTTPConnection(host, port, timeout=_ASK_S)
        try:
            secret = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json", **secret})
            heard = connection.getresponse()
            said: Any = json.loads(heard.read())
        except (HTTPException, OSError, ValueError) as error:
            raise EngineFailed(f"the worker at {host}:{port} does not answer: {error}") from error
        finally:
            connection.close()
        if heard.status != 200:
            refused = Conflict if heard.status == 409 else EngineFailed
            raise refused(f"the worker at {host}:{port} answered {heard.status} to {method} {path}")
        return cast("dict[str, Any]", said)
