"""`make train`: asynchronous GRPO on the embedded model, end to end on this machine.

Agents play groups through the gate all the time; the trainer claims groups that are not too old, loads their rows,
makes a gradient step and hands new weights to the engine while rollouts go on. What it shows: the share of solved
problems rises; trainer and sampler agree to float noise wherever they hold the same weights, because rows hold the
very tokens that were sampled; and how that looks with rows made of text that is tokenized again (`--data text`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tokenlake.api.client import AsyncClient
from tokenlake.api.demo.curves import draw
from tokenlake.api.demo.gauges import gate_metrics
from tokenlake.api.demo.learner import Learner
from tokenlake.api.demo.retokenized import retokenize
from tokenlake.api.demo.solver import Conversation, Problem, make_problems, play
from tokenlake.api.serve import Running, embedded
from tokenlake.api.service import Service
from tokenlake.api.settings import Settings
from tokenlake.finalize.loader import RowLoader
from tokenlake.finalize.tensors import Batch
from tokenlake.ingest.tiny import TinyEngine
from tokenlake.store.lake import OwnedLake

__all__ = ["Options", "main", "train"]

_log = logging.getLogger(__name__)
_HANDLED = "SELECT count(*) AS handled FROM claims WHERE consumer = 'trainer'"
"""Groups that were handed out or, being too old, passed over."""
_FLOAT_NOISE = 1e-10
"""k3 of two log-probabilities that are 1e-5 apart is 5e-11."""
_PATIENT_S = 600.0
"""Service, agents and trainer share the machine: a busy one makes a run slow, and nothing of it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is made of."""

    steps: int = 22
    groups: int = 4
    """Groups of a step."""
    rollouts: int = 8
    """Rollouts of a group."""
    ahead: int = 6
    """Groups that are being played or wait for the trainer, at most."""
    max_staleness: int = 2
    """Versions that a group's oldest token may lie behind the trainer's."""
    learning_rate: float = 6e-4
    seed: int = 0
    data: str = "tokens"
    """`tokens`: the captured rows. `text`: rows made of the agents' text."""


def train(path: Path, options: Options, log: Path | None = None) -> list[dict[str, Any]]:
    """Train over a new lake at `path`; the log of each step, also written to `log` as JSON lines."""
    engine = TinyEngine(seed=options.seed)
    service_policy = {"max_staleness": options.max_staleness}
    settings = Settings(control_deadline_s=_PATIENT_S, sql_timeout_s=_PATIENT_S)
    with OwnedLake.open(path) as lake, embedded(Service(lake, engine, settings, policy=service_policy)) as running:
        return asyncio.run(_Run(running, engine, path, options, log).steps())


class _Run:
    def __init__(self, running: Running, engine: TinyEngine, path: Path, options: Options, log: Path | None) -> None:
        self._running, self._engine, self._path, self._options, self._log = running, engine, path, options, log
        self._said: dict[str, Conversation] = {}
        self._published = asyncio.Event()
        self._wanted = asyncio.Semaphore(options.ahead)
        self._handled = 0

    async def steps(self) -> list[dict[str, Any]]:
        options = self._options
        learner = Learner(
            self._engine.model.config,
            self._engine.model.state_dict(),
            options.learning_rate,
            version=self._engine.weight_version or 0,
            remembered=options.max_staleness + 1,
        )
        done: list[dict[str, Any]] = []
        async with AsyncClient(self._running.url, self._running.token, deadline_s=_PATIENT_S) as client:
            await client.set_weight_version(learner.version)
            async with self._players(client):
                for number in range(options.steps):
                    began = time.monotonic()
                    claims, names = await self._claimed(client, learner.version)
                    waited = time.monotonic() - began
                    entry = await asyncio.to_thread(self._learn, learner, names)
                    await self._engine.set_weights(learner.state(), learner.version)
                    await client.set_weight_version(learner.version)
                    for claim_id in claims:
                        await client.consume(claim_id, checkpoint=f"step-{number}")
                    gate = await gate_metrics(self._running.url, self._running.token)
                    times = {"waited_s": round(waited, 3), "step_s": round(time.monotonic() - began, 3)}
                    done.append({"step": number, "data": options.data, "seed": options.seed} | entry | times | gate)
                    self._tell(done[-1])
        return done

    @contextlib.asynccontextmanager
    async def _players(self, client: AsyncClient) -> AsyncGenerator[None]:
        """Groups are played, a bounded number at a time, until the block ends; a failure of one fails the run."""
        options = self._options
        problems = make_problems(2 * options.steps * options.groups + options.ahead, options.seed)
        async with asyncio.TaskGroup() as tasks:

            async def dispatch() -> None:
                async with asyncio.TaskGroup() as playing:
                    for number, problem in enumerate(problems):
                        await self._wanted.acquire()
                        playing.create_task(self._play(client, f"g{number:04d}", problem))

            dispatched = tasks.create_task(dispatch())
            yield
            dispatched.cancel()

    async def _play(self, client: AsyncClient, group_id: str, problem: Problem) -> None:
        await play(client, group_id, self._options.rollouts, problem, self._said)
        self._published.set()

    async def _claimed(self, client: AsyncClient, version: int) -> tuple[list[str], list[str]]:
        """As many groups as a step takes, from as many claims as that needs, none of them too old."""
        claims: list[str] = []
        names: list[str] = []
        while len(names) < self._options.groups:
            self._published.clear()
            missing = self._options.groups - len(names)
            claim = await client.claim("trainer", groups=missing, current_version=version)
            handled: int = (await client.sql(_HANDLED))["rows"][0]["handled"]
            for _ in range(handled - self._handled):
                self._wanted.release()
            self._handled = handled
            if claim["groups"]:
                claims.append(claim["claim_id"])
                names += [group["group_id"] for group in claim["groups"]]
            else:
                await self._published.wait()
        return claims, names

    def _learn(self, learner: Learner, names: Sequence[str]) -> dict[str, Any]:
        loader = RowLoader(self._path, groups=names, groups_per_batch=len(names), token_versions=True)
        (batch,) = loader
        sampled = _versions(batch)
        made = retokenize(self._engine, batch, self._said)
        used = batch if self._options.data == "tokens" else made.batch
        version, update = learner.version, learner.step(used, sampled)
        share = made.differ / max(update.valid_rows, 1)
        return {"version": version} | asdict(update) | {"differ_share": share}

    def _tell(self, entry: dict[str, Any]) -> None:
        plain = {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in entry.items()
        }
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain) + "\n")
        sys.stdout.write(
            f"{entry['data']:6} seed {entry['seed']}  step {entry['step']:2d}  solved {entry['reward']:.2f}  "
            f"k3 {entry['kl']:.1e}, under their own version {entry['kl_same']:.1e} ({entry['same_rows']} rows)  "
            f"valid {entry['valid_rows']}/{entry['rows']}  behind {entry['staleness']:.1f}, at most "
            f"{entry['staleness_max']}  ids differ {entry['differ_share']:.0%}  {entry['step_s']:.1f} s\n"
        )
        sys.stdout.flush()


def _versions(batch: Batch) -> torch.Tensor:
    """int64 [R, 2]: the oldest and the newest version among each row's sampled tokens; -1 where one is unknown."""
    sampled = batch["token_mask"] == 1
    versions = batch["weight_versions"]
    oldest = versions.masked_fill(~sampled, torch.iinfo(torch.int64).max).min(dim=1).values
    newest = versions.masked_fill(~sampled, -1).max(dim=1).values
    return torch.stack((oldest, newest), dim=1)


def main() -> int:
    """0 when every run of `tokens` rose and agreed with its sampler, 1 otherwise."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="make train", description=(__doc__ or "").partition("\n")[0])
    for name in ("steps", "groups", "rollouts", "ahead", "max_staleness", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--data", choices=("tokens", "text", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind, from --seed on")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="where train.jsonl and curves.png go")
    given = vars(parser.parse_args())
    out, kinds, seeds, first = given.pop("out"), given.pop("data"), given.pop("seeds"), given.pop("seed")
    out.mkdir(parents=True, exist_ok=True)
    log = out / "train.jsonl"
    log.unlink(missing_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(first, first + seeds):
        for data in ("tokens", "text") if kinds == "both" else (kinds,):
            with tempfile.TemporaryDirectory(prefix="tokenlake-train-") as folder:
                options = Options(**given, seed=seed, data=data)
                runs[f"{data} {seed}"] = train(Path(folder) / "lake", options, log)
    draw(out / "curves.png", runs)
    verdicts = [_verdict(name, steps) for name, steps in runs.items()]
    sys.stdout.write(f"steps: {log}; curves: {out / 'curves.png'}\n")
    return 0 if all(verdicts) else 1


def _verdict(name: str, steps: Sequence[dict[str, Any]]) -> bool:
    """Says what a run came to, and whether it is what its kind of rows promises."""
    edge = max(1, len(steps) // 5)
    before, after = (sum(step["reward"] for step in part) / edge for part in (steps[:edge], steps[-edge:]))
    same = [step["kl_same"] for step in steps if not math.isnan(step["kl_same"])]
    differ = sum(step["differ_share"] for step in steps) / len(steps)
    seconds = sum(step["step_s"] for step in steps)
    sys.stdout.write(
        f"{name}: solved {before:.2f} at first, {after:.2f} at last; k3 under their own version at most "
        f"{max(same, default=math.nan):.1e}; ids of the text differ in {differ:.1%} of the rows; {seconds:.0f} s\n"
    )
    return not name.startswith("tokens") or (after > before and max(same, default=math.inf) < _FLOAT_NOISE)


if __name__ == "__main__":
    raise SystemExit(main())
