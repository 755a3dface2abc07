"""W4: record a call without its tokens, resolve the request after it, hold what that takes; long and short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench import gate_lineage, history
from bench.conversations import Conversation, Seconds, around, conversations
from bench.measure import Sample, typical
from bench.peers import peer
from bench.plan import Plan
from bench.soak import held
from bench.table import Contender, Figure, Row
from tokenlake.store.lake import OwnedLake

__all__ = ["rows"]

_SHORT, _LONGER = 2, 16
"""Turns whose cost is compared with that of a long conversation's last."""
_LONG = 8
"""Long conversations."""
_HELD = 50
"""Conversations of the memory that is counted: `tracemalloc` makes everything slow."""


def rows(plan: Plan) -> list[Row]:
    """The rows of lineage."""
    count, turns, long = plan.size.conversations
    work = conversations(count, turns=turns, seed=plan.seed)
    gym = peer(plan, "nemo-gym", "ledger", max(1, count // plan.size.peer_share), turns)
    ours = Contender(name="tokenlake", run=plan.fresh(lambda folder: _ours(folder, work, turns)))
    sqlite = Contender(name="SQLite", run=plan.fresh(lambda folder: _sqlite(folder, work, turns)))
    made = [
        Row(
            work="W4",
            what=f"{measure} a call, {count} rollouts x {turns} turns",
            unit="calls/s",
            ours=Figure(ours, measure),
            floor=Figure(sqlite, measure),
            peers=gym(measure),
        )
        for measure in ("record", "resolve")
    ]
    return [*made, _memory(plan, work, turns), *_growth(plan, long)]


def _sample(seconds: Sequence[float]) -> Sample:
    return Sample(value=len(seconds) / sum(seconds), latencies=seconds)


def _ours(folder: Path, work: Sequence[Conversation], turns: int) -> dict[str, Sample]:
    seconds = gate_lineage.play(folder / "lake", work, turns)
    return {"record": _sample(seconds.record), "resolve": _sample(seconds.resolve)}


def _sqlite(folder: Path, work: Sequence[Conversation], turns: int) -> dict[str, Sample]:
    seconds = history.play(folder, work, turns)
    return {"record": _sample(seconds.record), "resolve": _sample(seconds.resolve)}


def _memory(plan: Plan, work: Sequence[Conversation], turns: int) -> Row:
    work = work[:_HELD]
    path = plan.scratch / "held"
    gate_lineage.play(path, work, turns)
    lake = plan.held.enter_context(OwnedLake.open(path))
    return Row(
        work="W4",
        what="memory of a call while its rollout is open",
        unit="B",
        ours=_figure("tokenlake", lambda: held(lake)),
        floor=_figure("dict", lambda: history.held(work, turns)),
        peers=peer(plan, "nemo-gym", "held", len(work), turns)("held"),
    )


def _figure(name: str, run: Callable[[], float]) -> Figure:
    return Figure(Contender(name=name, run=lambda: {"held": Sample(value=run())}), "held")


def _growth(plan: Plan, long: int) -> list[Row]:
    """What a turn costs late in a conversation, beside what it costs at its beginning."""
    turns = (_SHORT, _LONGER, long)
    work = conversations(_LONG, turns=long, seed=plan.seed)

    def near(seconds: Seconds) -> dict[str, Sample]:
        return {f"{measure} {turn}": _turn(seconds, measure, turn) for measure in _MEASURES for turn in turns}

    ours = Contender(
        name=f"turn {_SHORT}", run=plan.fresh(lambda folder: near(gate_lineage.play(folder / "lake", work, long)))
    )
    sqlite = Contender(name="SQLite", run=plan.fresh(lambda folder: near(history.play(folder, work, long))))
    gym = peer(plan, "nemo-gym", "growth", _LONG, long, *turns)
    return [
        Row(
            work="W4",
            what=f"{what}, turn {turn}",
            unit="us",
            ours=Figure(ours, f"{measure} {turn}"),
            floor=Figure(ours, f"{measure} {_SHORT}"),
            peers=[Figure(sqlite, f"{measure} {turn}"), *(gym(f"{measure} {turn}") if measure != "look_up" else ())],
        )
        for measure, what in _MEASURES.items()
        for turn in turns[1:]
    ]


_MEASURES = {
    "record": "record",
    "resolve": "resolve",
    "look_up": "look up a fingerprint",
}


def _turn(seconds: Seconds, measure: str, turn: int) -> Sample:
    """Microseconds."""
    near = around(getattr(seconds, measure), turn, _LONG)
    return Sample(value=typical(near).value * 1e3, latencies=near)
