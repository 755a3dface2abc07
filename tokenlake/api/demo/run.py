"""`tokenlake demo`: start, play, publish, load, prove, say."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tokenlake import open as open_lake
from tokenlake.api.client import AsyncClient
from tokenlake.api.demo.agents import Agent, Pause, Traffic, slot_of
from tokenlake.api.demo.plan import expected, kind_of
from tokenlake.api.demo.policy import EmbeddedPolicy, Policy, State
from tokenlake.api.demo.proof import Proof, Scorer, prove
from tokenlake.api.demo.report import complaints, measure, show
from tokenlake.api.demo.tasks import make_tasks
from tokenlake.api.demo.vllm_policy import vllm_policy
from tokenlake.api.serve import Running, embedded
from tokenlake.api.service import Service
from tokenlake.errors import ConfigError
from tokenlake.finalize.loader import RowLoader
from tokenlake.ingest.tiny.score import score
from tokenlake.store.lake import OwnedLake

__all__ = ["run"]

_UPDATE_AFTER = 0.3
"""Share of the rollouts that have ended when the weights change."""
_NOISE = 2e-3
_HINTS = """look around with:
  tokenlake sql --lake {path} "SELECT rollout_id, verdict, reason, reward FROM rollouts"
  tokenlake inspect --lake {path} ROLLOUT_ID
  tokenlake serve --lake {path}   # and the console, at the address it prints
"""


@dataclass(slots=True)
class _Run:
    """What one demo run has made so far."""

    weights: dict[int | None, State] = field(default_factory=dict[int | None, State])
    traffic: Traffic = field(default_factory=Traffic)
    ended: int = 0


def run(arguments: argparse.Namespace) -> int:
    """`tokenlake demo`: 0 when the lake says what was planted and the rows are proven right, 1 otherwise."""
    if arguments.groups < 1 or arguments.rollouts < 1:
        raise ConfigError("--groups and --rollouts must be at least 1")
    kept = arguments.lake is not None
    folder = Path(tempfile.mkdtemp(prefix="tokenlake-demo-"))
    path = arguments.lake if kept else folder / "lake"
    if kept and path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty: the demo starts a lake of its own")
    try:
        return _demo(path, folder, arguments, kept=kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _policy(path: Path, folder: Path, arguments: argparse.Namespace, console: Console) -> Generator[Policy]:
    if arguments.engine == "tiny":
        yield EmbeddedPolicy(folder / "engine-trace.jsonl", arguments.seed)
        return
    console.print("starting vLLM: up to a few minutes")
    with vllm_policy(arguments.vllm_python, path, folder) as policy:
        yield policy


def _demo(path: Path, folder: Path, arguments: argparse.Namespace, *, kept: bool) -> int:
    console = Console()
    began = time.monotonic()
    done = _Run()
    with _policy(path, folder, arguments, console) as policy:
        lake = OwnedLake.open(path)
        try:
            with (
                embedded(Service(lake, policy.backend)) as running,
                _Advance(console, arguments.groups * arguments.rollouts) as advance,
            ):
                console.print(f"service at {running.url}, lake at {path}")
                asyncio.run(_play(running, policy, done, arguments, advance))
        finally:
            lake.close()
    traced = policy.traced()
    reader = open_lake(path)
    try:
        batches = list(RowLoader(path, groups_per_batch=2, seed=arguments.seed))
        proof: Proof = prove(reader, traced, _scorer(done))
        figures = measure(reader, path)
    finally:
        reader.close()
    loaded = sum(len(batch["sample_ids"]) for batch in batches)
    loaded_bytes = sum(t.numel() * t.element_size() for b in batches for t in b.values() if isinstance(t, torch.Tensor))
    planned = expected(arguments.groups, arguments.rollouts)
    show(console, policy.title, figures, proof, done.traffic, time.monotonic() - began, loaded_bytes)
    wrong = complaints(figures, planned, proof, loaded, arguments.groups * arguments.rollouts)
    for complaint in wrong:
        sys.stderr.write(f"tokenlake: {complaint}\n")
    if kept and not wrong:
        sys.stdout.write(_HINTS.format(path=path))
    return 1 if wrong else 0


class _Advance:
    """A progress bar over rollouts, silent where the output is no terminal."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("rollouts", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self) -> None:
        self._bar.advance(self._task)


async def _play(running: Running, policy: Policy, done: _Run, arguments: argparse.Namespace, advance: _Advance) -> None:
    groups, rollouts = arguments.groups, arguments.rollouts
    tasks = make_tasks(groups, arguments.seed)
    pause = Pause()
    first = 0
    await policy.load(policy.weights, first)
    done.weights[first] = policy.weights
    async with AsyncClient(running.url, running.token) as control:
        await control.set_weight_version(first)
        slots = [
            await control.register_group(f"demo-{g:02d}", rollouts, meta={"task": "chain_sum"}) for g in range(groups)
        ]

        async def rollout(g: int, i: int) -> None:
            agent = Agent(kind_of(g, i, groups, rollouts), tasks[g], control, pause, done.traffic)
            await agent.run(slot_of(_entries(slots[g])[i]))
            done.ended += 1
            advance()
            if done.ended == max(1, int(_UPDATE_AFTER * groups * rollouts)):
                await _update(policy, control, pause, done, first + 1, arguments.seed)

        async with asyncio.TaskGroup() as running_tasks:
            for g in range(groups):
                for i in range(rollouts):
                    running_tasks.create_task(rollout(g, i))
        await _published(control, groups)


def _entries(registered: Any) -> Sequence[Mapping[str, Any]]:
    return registered["rollouts"]


async def _update(policy: Policy, control: AsyncClient, pause: Pause, done: _Run, version: int, seed: int) -> None:
    """One training step's worth of other weights, between calls, so that each call has one version."""
    generator = torch.Generator().manual_seed(seed)
    before = policy.weights
    after = {
        name: weight + _NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
        if weight.is_floating_point() and weight.numel() > 1
        else weight
        for name, weight in before.items()
    }
    await pause.hold()
    try:
        await policy.load(after, version)
        await control.set_weight_version(version)
        done.weights[version] = policy.weights
    finally:
        pause.resume()


def _scorer(done: _Run) -> Scorer:
    def scored(version: int | None, ids: Sequence[int]) -> list[float]:
        return cast("Any", score(done.weights[version], ids)).tolist()

    return scored


async def _published(control: AsyncClient, groups: int) -> None:
    """Wait until every group is published; the service does so itself when the last rollout of a group ends."""
    for g in range(groups):
        await control.publish(f"demo-{g:02d}")
