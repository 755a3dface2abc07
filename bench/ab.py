"""The same agents on the same seeds, once through a lake and once by the echo path: bytes, calls, time, rows.

Both ways run over one embedded engine, in turn, round by round. It takes one request at a time, because sums over
batches of another size round otherwise: with that, and a seed for each call, both ways must give the same rows to the
bit, or the run fails. Bytes are those of HTTP bodies and of files, without headers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.echo_twin import EchoTwin, Row
from tokenlake.api.client import AsyncClient
from tokenlake.api.demo.agents import Pause, Player, Slot, Traffic, slot_of
from tokenlake.api.demo.tasks import Task, make_tasks
from tokenlake.api.metrics import Metrics
from tokenlake.api.serve import embedded, in_thread
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment
from tokenlake.ids import rollout_id
from tokenlake.ingest.tiny import TinyEngine
from tokenlake.store.lake import OwnedLake

__all__ = ["Step", "Work", "by_echo", "by_lake", "differing"]

_TOKEN = "ab"
_SEEDS_APART = 1024
"""Between the first calls of two rollouts: more than a rollout has calls."""
_Ended = Callable[[Slot, Player, float, str], Awaitable[object]]
"""What an agent does in the end, with its reward and the id of its last response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The rollouts of one step."""

    groups: int
    rollouts: int
    checks: int
    seed: int

    @property
    def names(self) -> list[str]:
        """Groups."""
        return [f"ab{group}" for group in range(self.groups)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step took, from the first registration to rows in the trainer's hands."""

    seconds: float
    calls: list[int]
    """Of each rollout."""
    hops: dict[str, int]
    """Bytes of HTTP bodies by hop."""
    disk: dict[str, int]
    """Bytes of files by kind."""
    rows: dict[str, Row]

    @property
    def trained(self) -> int:
        """Tokens that are trained on."""
        return sum(sum(row.token_mask) for row in self.rows.values())

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """By hop, of all hops, and on disk."""
        sizes = {**self.hops, "all of HTTP": sum(self.hops.values()), **self.disk}
        return {name: size / self.trained for name, size in sizes.items()}


def by_lake(engine: TinyEngine, work: Work, folder: Path) -> Step:
    """Through the gate into a lake, and out of it as Arrow."""
    environment = Environment(token=_TOKEN, token_given=True, capability_key="ab" * 32, state_dir=folder)
    path = folder / "lake"
    with OwnedLake.open(path) as lake:
        service = Service(lake, engine, environment=environment)
        with embedded(service) as running:
            return asyncio.run(_through_gate(work, running.url, service.metrics, path))


async def _through_gate(work: Work, url: str, metrics: Metrics, path: Path) -> Step:
    began = time.monotonic()
    async with AsyncClient(url, _TOKEN) as client:
        slots: list[Slot] = []
        for name in work.names:
            slots += map(slot_of, (await client.register_group(name, work.rollouts))["rollouts"])

        async def seal(slot: Slot, _player: Player, reward: float, response_id: str) -> None:
            await client.seal(slot.rollout_id, reward=reward, terminal_response_id=response_id)

        calls = await _play(work, slots, Traffic(), seal)
        for name in work.names:
            await client.publish(name)
        control = _bytes(metrics, "trainer", "in") + _bytes(metrics, "trainer", "out")
        table = (await client.rows(limit=len(slots)))[0]
        seconds = time.monotonic() - began
    hops = {
        "agent to gate": _bytes(metrics, "agent", "in"),
        "gate to agent": _bytes(metrics, "agent", "out"),
        "trainer and gate: register, seal, publish": control,
        "lake to trainer: rows": _bytes(metrics, "trainer", "in") + _bytes(metrics, "trainer", "out") - control,
    }
    disk = {f"disk: {kind}": _size(path / kind) for kind in ("deltas", "lineage", "rows")}
    rows = {row["rollout_id"]: _row(row) for row in table.to_pylist()}
    return Step(seconds=seconds, calls=calls, hops=hops, disk=disk, rows=rows)


def by_echo(engine: TinyEngine, work: Work) -> Step:
    """Through the twin, in the agents' messages, and with them to the trainer."""
    twin = EchoTwin(engine)
    with in_thread(twin.app()) as (url, _):
        return asyncio.run(_through_agents(work, url, twin))


async def _through_agents(work: Work, url: str, twin: EchoTwin) -> Step:
    began, traffic = time.monotonic(), Traffic()
    names = [rollout_id(group, index) for group in work.names for index in range(work.rollouts)]
    slots = [Slot(rollout_id=name, attempt=0, base_url=f"{url}/v1", data_capability="-") for name in names]
    async with httpx.AsyncClient(base_url=url) as trainer:

        async def deliver(slot: Slot, player: Player, reward: float, _response_id: str) -> None:
            whole = {"reward": reward, "messages": player.messages}
            (await trainer.post(f"/trainer/{slot.rollout_id}", json=whole)).raise_for_status()

        calls = await _play(work, slots, traffic, deliver)
    hops = {
        "agent to server": traffic.requests,
        "server to agent": traffic.responses,
        "agent to trainer": twin.delivered,
    }
    return Step(seconds=time.monotonic() - began, calls=calls, hops=hops, disk={}, rows=twin.rows)


async def _play(work: Work, slots: Sequence[Slot], traffic: Traffic, ended: _Ended) -> list[int]:
    """All rollouts at once; the calls of each."""
    tasks, pause = make_tasks(work.groups, work.seed), Pause()

    async def rollout(number: int, slot: Slot, task: Task) -> int:
        seed = work.seed + number * _SEEDS_APART
        player = Player("plain", task, pause, traffic, checks=work.checks, seed=seed)
        answer, response_id = await player.solve(slot)
        await ended(slot, player, task.score(answer), response_id)
        return player.calls

    return await asyncio.gather(
        *(rollout(number, slot, tasks[number // work.rollouts]) for number, slot in enumerate(slots))
    )


def differing(step: Step, other: Step) -> list[str]:
    """Rollouts whose rows differ in an id, a mask or a bit of a log-probability, or are missing on one side."""
    names = sorted({*step.rows, *other.rows})
    return [name for name in names if step.rows.get(name) != other.rows.get(name)]


def _row(row: Mapping[str, Any]) -> Row:
    logprobs = array("f", row["logprobs"]).tobytes()
    return Row(input_ids=row["input_ids"], token_mask=row["token_mask"], logprobs=logprobs)


def _bytes(metrics: Metrics, peer: str, direction: str) -> int:
    return int(metrics.registry.get_sample_value("http_bytes_total", {"peer": peer, "direction": direction}) or 0)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.arrow"))


def main() -> None:
    """Print the table; 1 where a row differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.ab", description=__doc__)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--checks", type=int, default=2, help="how often an agent is told to check")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    engine = TinyEngine(max_batch=1)
    times: list[tuple[float, float]] = []
    for number in range(arguments.rounds):
        work = Work(
            groups=arguments.groups, rollouts=arguments.rollouts, checks=arguments.checks, seed=arguments.seed + number
        )
        with tempfile.TemporaryDirectory(prefix="tokenlake-ab-") as folder:
            lake, echo = by_lake(engine, work, Path(folder)), by_echo(engine, work)
        times.append((lake.seconds, echo.seconds))
        wrong = differing(lake, echo)
        if wrong or lake.calls != echo.calls:
            raise SystemExit(f"round {number}: rows or calls differ: {', '.join(wrong) or 'calls'}")
        if number == 0:
            _show(lake, echo)
    ratio = statistics.median(by_lake / by_echo for by_lake, by_echo in times)
    print("step, seconds (lake, echo): " + "; ".join(f"{lake:.2f}, {echo:.2f}" for lake, echo in times))
    print(f"step time, lake by echo: {ratio:.2f} (median of {len(times)}); every row of every round equal to the bit")


def _show(lake: Step, echo: Step) -> None:
    calls = sorted(lake.calls)
    print(
        f"{len(lake.rows)} rollouts, {sum(calls)} calls ({calls[0]} to {calls[-1]} a rollout), {lake.trained} trained "
        "tokens; bytes for each of them:"
    )
    for name, step in (("lake", lake), ("echo", echo)):
        for hop, size in step.bytes_per_token.items():
            print(f"  {name}  {hop:<44} {size:9.1f}")


if __name__ == "__main__":
    main()
