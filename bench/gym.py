"""NeMo-Gym as a peer: its own code in an environment of its own, which prints what it measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench.measure import Sample
from bench.plan import Plan
from bench.table import Contender, Figure

__all__ = ["gym"]

_ROOT = Path(__file__).parents[1]


def gym(plan: Plan, work: str, *spec: int) -> Callable[[str], tuple[Figure, ...]]:
    """The figures of one work of `bench.nemo_gym_peer` by what they measure; none where its environment is not there.

    `spec`: how much it does.
    """
    if plan.gym is None:
        return lambda _: ()
    command = [str(plan.gym.absolute()), "-m", "bench.nemo_gym_peer", work, str(plan.seed), *map(str, spec)]

    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}  # before what is installed there: it may be another checkout

    def run(folder: Path) -> dict[str, Sample]:
        done = subprocess.run(
            [*command, str(folder)], cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        return {name: Sample(value=value, latencies=latencies) for name, (value, latencies) in found.items()}

    contender = Contender(name="NeMo-Gym", run=plan.fresh(run))
    return lambda measure: (Figure(contender, measure),)
