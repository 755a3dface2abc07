"""A pool of Ray actors that judge due groups, for lakes that one machine judges too slowly.

Each actor opens the lake's folder for reading, on whatever node it lives, so that folder has to be the same one there:
a shared file system. Shards of groups go to the actors, rows and verdicts come back through Ray's object store, and the
owner alone writes. An actor or node that dies is started again and its shards are judged again; a judgement changes
nothing, so the rows are the same bytes whoever made them, and however often.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenlake import sql
from tokenlake.actors import actor_of, answer, end, join, node_address
from tokenlake.errors import ConfigError, Deadline
from tokenlake.finalize.judge import Judgement, judge, shards
from tokenlake.store.reader import Lake

__all__ = ["FinalizerPool"]

_RETRIES = 5
"""How often a shard whose actor died is judged again."""
_SEEN_S = 30.0
_LOOK_S = 0.05


class FinalizerPool:
    """Judges as `publish_due(..., judges=pool)` wants it. Used by one thread at a time.

    `path`: the lake's folder, as every node sees it. `actors`: how many. `options`: Ray's options for each of them
    (`num_cpus`, `resources`, `runtime_env`, ...). `deadline_s`: the longest that one shard may take. Without a running
    Ray it joins the one of `RAY_ADDRESS` or of this machine; raises `ConfigError` where there is none.
    """

    def __init__(
        self,
        path: Path,
        *,
        actors: int,
        options: Mapping[str, Any] | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        if actors < 1:
            raise ConfigError("a finalizer pool has at least 1 actor")
        join()
        self._path = path.absolute()
        self._deadline_s = deadline_s
        made = actor_of(Finalizer, options, max_task_retries=_RETRIES)
        self._actors: list[Any] = [made.remote(str(self._path)) for _ in range(actors)]

    def __call__(self, due: Sequence[str], *, now: int, upto: int) -> Iterator[Judgement]:
        """Judgements of due groups, a shard each, in the order of their ids; a shard for every actor at a time.

        Raises what an actor raised, `EngineFailed` where one died again and again, `Deadline` where one did not answer.
        """
        waiting: deque[Any] = deque()
        for number, shard in enumerate(shards(due, -(-len(due) // len(self._actors)))):
            if len(waiting) == len(self._actors):
                yield self._answer(waiting.popleft())
            waiting.append(self._actors[number % len(self._actors)].judge.remote(list(shard), now, upto))
        while waiting:
            yield self._answer(waiting.popleft())

    def close(self) -> None:
        """End the actors. Idempotent."""
        end(self._actors)
        self._actors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, waiting: Any) -> Judgement:
        return answer(waiting, f"a finalizer of {self._path}", self._deadline_s)


class Finalizer:
    """What an actor does; its own reader of the lake lives as long as it does."""

    def __init__(self, path: str) -> None:
        self._lake = Lake(path)

    def judge(self, due: list[str], now: int, upto: int) -> Judgement:
        """Judge a shard once the lake's event `upto` can be seen here.

        Raises `Deadline` where it stays away, and what `judge` raises.
        """
        until = time.monotonic() + _SEEN_S
        while not self._sees(upto):
            if time.monotonic() > until:
                raise Deadline(
                    f"event {upto} of {self._lake.path} is not to be seen from {node_address()}: the "
                    "folder there is not the owner's",
                    event_seq=upto,
                )
            time.sleep(_LOOK_S)
        return judge(self._lake, due, now)

    def _sees(self, upto: int) -> bool:
        self._lake.refresh()
        return self._lake.sql(sql.read("reads/last_event")).fetchall()[0][0] >= upto
