"""Systems of others as peers: their own code in environments of their own, which answers with what it measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from bench.measure import Sample
from bench.plan import Plan
from bench.table import Contender, Figure

__all__ = ["PEERS", "peer", "served"]

PEERS = {
    "nemo-gym": ("NeMo-Gym", "bench.nemo_gym_peer"),
    "lance": ("Lance", "bench.lance_peer"),
    "transferqueue": ("TransferQueue", "bench.transferqueue_peer"),
}
"""As the table has it, and the module that `bench.answer` answers for, by the name that `make bench` takes."""
_ROOT = Path(__file__).parents[1]


def peer(plan: Plan, name: str, work: str, *spec: int, label: str = "") -> Callable[[str], tuple[Figure, ...]]:
    """The figures of one work of a peer's module by what they measure; none where its environment is not there.

    `spec`: how much it does. `label`: as the table has it, where that is not the peer's name alone.
    """
    if name not in plan.peers:
        return lambda _: ()
    called, module = PEERS[name]
    command = [*_python(plan.peers[name]), module, work, str(plan.seed), *map(str, spec)]

    def run(folder: Path) -> dict[str, Sample]:
        done = subprocess.run(
            [*command, str(folder)], cwd=_ROOT, env=_environment(), stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        return {measure: Sample(**sample) for measure, sample in found.items()}

    contender = Contender(name=label or called, run=plan.fresh(run))
    return lambda measure: (Figure(contender, measure),)


@contextmanager
def served(python: Path, folder: Path) -> Generator[tuple[str, list[float]]]:
    """The URL of `bench.nemo_gym_gate`, and a list that holds, once it has ended, the seconds of each call."""
    command = [*_python(python), "bench.nemo_gym_gate", str(folder)]
    handled: list[float] = []
    with subprocess.Popen(
        command, cwd=_ROOT, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both were asked for")
        try:
            yield json.loads(process.stdout.readline())["url"], handled
        finally:
            process.stdin.close()
        handled += json.loads(process.stdout.readline())


def _python(path: Path) -> list[str]:
    return [str(path.absolute()), "-m"]


def _environment() -> dict[str, str]:
    """Where this checkout comes before what is installed there: it may be another."""
    return {**os.environ, "PYTHONPATH": str(_ROOT)}
