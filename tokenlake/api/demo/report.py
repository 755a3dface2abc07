"""The demo's last word: what happened, what was planted, and whether the lake says the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tokenlake import sql
from tokenlake.api.demo.agents import Traffic
from tokenlake.api.demo.plan import Expected
from tokenlake.api.demo.proof import Proof
from tokenlake.store.lineage import events_end
from tokenlake.store.maps import SegmentMaps
from tokenlake.store.reader import Lake

__all__ = ["Figures", "complaints", "measure", "show"]

_FLOAT_NOISE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the lake says of the run."""

    groups: int
    rows: int
    valid_rows: int
    placeholders: dict[str, int]
    roots: dict[str, int]
    calls: int
    token_in: int
    mean_reward: float
    mixed_groups: int
    """Groups whose valid rewards differ: the ones with a training signal."""
    version_spread: dict[str, int]
    sampled_tokens: int
    trained_tokens: int
    staged_bytes: int
    lineage_bytes: int
    faults: int


def measure(lake: Lake, path: Path) -> Figures:
    """Ask the lake; one query, `sql/reads/demo_figures.sql`, and the size of its lineage files."""
    found = lake.sql(sql.read("reads/demo_figures"))
    values = dict(zip(found.columns, found.fetchall()[0], strict=True))
    for name in ("placeholders", "roots", "version_spread"):
        values[name] = json.loads(values[name] or "{}")
    maps = SegmentMaps(path)
    logs = (maps.get(str(file.relative_to(path))) for file in path.glob("lineage/*/*.arrow"))
    return Figures(**values, lineage_bytes=sum(events_end(log) for log in logs if log is not None))


def complaints(figures: Figures, planned: Expected, proof: Proof, loaded_rows: int, rows: int) -> list[str]:
    """Where the lake and the plan disagree; empty means the demo holds."""

    def differ(what: str, said: Any, planted: Any) -> Iterable[str]:
        if said != planted:
            yield f"{what}: the lake says {said}, planted was {planted}"

    return [
        *differ("rows", figures.rows, rows),
        *differ("valid rows", figures.valid_rows, planned.valid_rows),
        *differ("placeholders", figures.placeholders, planned.placeholders),
        *differ("roots by cause", figures.roots, planned.roots),
        *differ("continued turns served token-in", figures.token_in, figures.calls - sum(planned.roots.values())),
        *differ("rows in loader batches", loaded_rows, rows),
        *differ("rows proven", proof.rows, planned.valid_rows),
        *differ("rows that differ from the engine's trace", proof.disagreements, 0),
        *differ("audit faults", figures.faults, 0),
        *(
            [f"recomputed log-probabilities differ by {proof.largest_difference:.2e}"]
            if proof.largest_difference > _FLOAT_NOISE
            else []
        ),
    ]


def show(
    console: Console,
    engine: str,
    figures: Figures,
    proof: Proof,
    traffic: Traffic,
    seconds: float,
    loaded_bytes: int,
) -> None:
    """Print the summary table."""
    table = Table(title="Tokenlake demo", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()

    def counts(values: dict[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(values.items())) or "none"

    table.add_row("engine", engine)
    table.add_row("groups", f"{figures.groups} published, {figures.mixed_groups} with mixed rewards")
    table.add_row(
        "rows", f"{figures.rows}: {figures.valid_rows} valid, {figures.rows - figures.valid_rows} placeholders"
    )
    table.add_row("placeholders by reason", counts(figures.placeholders))
    table.add_row("mean reward of valid rows", f"{figures.mean_reward:.3f}")
    table.add_row("model calls", f"{figures.calls}, of which {figures.token_in} token-in")
    table.add_row("token-in rate", f"{figures.token_in / max(1, figures.calls):.3f}")
    table.add_row("roots by cause", counts(figures.roots))
    table.add_row("weight versions of rows", counts(figures.version_spread))
    table.add_row("sampled tokens", f"{figures.sampled_tokens}, of which {figures.trained_tokens} in rows")
    table.add_row(
        "bytes moved",
        f"agent to gate {traffic.requests:,}; gate to agent {traffic.responses:,}; worker to lake "
        f"{figures.staged_bytes:,}; lineage {figures.lineage_bytes:,}; lake to trainer {loaded_bytes:,}",
    )
    table.add_row(
        "proof by weights",
        f"{proof.sampled_tokens} sampled tokens of {proof.rows} rows; largest log-probability difference "
        f"{proof.largest_difference:.2e}",
    )
    table.add_row("proof by engine trace", f"{proof.rows - proof.disagreements} of {proof.rows} rows identical")
    table.add_row("audit", f"{figures.faults} faults")
    table.add_row("time", f"{seconds:.1f} s")
    console.print(table)
