"""A gate and capture workers on a Ray cluster: workers where Ray finds GPUs, the gate beside this driver.

    ray job submit --working-dir . -- python deploy/ray_launch.py \
        --lake /shared/lake --model org/model --workers 2 --gpus 8 -- --tensor-parallel-size 8

What follows `--` goes to every worker, as vLLM's own arguments. The lake and both environments lie on a file system
that all nodes share. It takes `TOKENLAKE_TOKEN`, prints the gate's address, and ends when the gate does; a worker that
ends is started again. Needs the extras `ray` and `serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import ray

from tokenlake.ingest.ray_workers import WorkerFleet

_POLL_S = 2.0


def gate_command(arguments: argparse.Namespace, upstream: str) -> list[str]:
    """What runs beside the driver, in its environment."""
    program = [sys.executable, "-m", "tokenlake.api.cli", "serve", "--lake", str(arguments.lake)]
    door = ["--host", "0.0.0.0", "--port", str(arguments.port)]
    return [*program, "--upstream", upstream, "--capture", "worker", *door]


def wait_for(url: str, process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Return once a URL answers; raises `SystemExit` where its process ends first, or time runs out."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).is_success:
                return
        time.sleep(_POLL_S)
    raise SystemExit(f"{url} did not answer: the log says why")


def register(gate_url: str, token: str, worker_id: str, url: str) -> None:
    """Have the gate send calls to a worker as well."""
    secret = {"Authorization": f"Bearer {token}"}
    httpx.put(
        f"{gate_url}/api/v1/workers/{worker_id}", json={"url": url}, headers=secret, timeout=60
    ).raise_for_status()


@contextlib.contextmanager
def gate(
    arguments: argparse.Namespace, upstream: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The gate, until the block ends; it seals what it wrote and lets the lake go."""
    process = subprocess.Popen(gate_command(arguments, upstream), env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; `rest` is vLLM's."""
    own, rest = list(argv), list[str]()
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lake", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=1, help="of each worker")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm"), help="the environment of the workers")
    parser.add_argument("--port", type=int, default=8000, help="of the gate")
    parser.add_argument("--start-s", type=float, default=1800, help="how long a worker may take to start")
    return argparse.Namespace(**vars(parser.parse_args(own)), rest=rest)


def main(argv: Sequence[str]) -> None:
    """Run until a process ends."""
    arguments = parse(argv)
    arguments.lake, arguments.vllm = arguments.lake.absolute(), arguments.vllm.absolute()
    token = os.environ.get("TOKENLAKE_TOKEN")
    if not token:
        raise SystemExit("TOKENLAKE_TOKEN is not set: make one with `openssl rand -hex 32` and keep it")
    key = secrets.token_hex(32)
    ray.init()
    with WorkerFleet(
        arguments.lake,
        workers=arguments.workers,
        arguments=["--model", arguments.model, *arguments.rest],
        options={"num_gpus": arguments.gpus},
        python=str(arguments.vllm / "bin" / "python"),
        key=key,
        deadline_s=arguments.start_s,
    ) as fleet:
        upstream = fleet.addresses()["worker-0"]
        with gate(arguments, upstream, {"TOKENLAKE_TOKEN": token, "TOKENLAKE_UPSTREAM_KEY": key}) as process:
            here = f"http://{ray.util.get_node_ip_address()}:{arguments.port}"
            wait_for(f"{here}/readyz", process, 60)
            print(f"gate at {here}, lake {arguments.lake}", flush=True)
            registered = {"worker-0": upstream}
            while process.poll() is None:
                known = fleet.addresses()  # starts again what has ended
                for name, url in sorted(known.items() - registered.items()):
                    register(here, token, name, url)
                registered = known
                time.sleep(_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
