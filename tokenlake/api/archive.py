"""Closed groups, back from the lake when somebody asks for one that is no longer in memory.

What closed never changes, so it is folded again from its own events, which costs that group and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenlake.api.control import Control
from tokenlake.api.registration import GroupLocks
from tokenlake.api.rollouts import Group

__all__ = ["Archive", "GroupEvents"]

_EVICTED = 4096


class GroupEvents(Protocol):
    """What is needed of a lake. Thread-safe."""

    def events_of(self, groups: Sequence[str], *, refresh: bool) -> list[dict[str, Any]]:
        """Every lineage event of some groups, in order; without `refresh`, those of the last one."""
        ...


class Archive:
    """The way from a group's id to what is known of it."""

    def __init__(self, lake: GroupEvents, control: Control, locks: GroupLocks) -> None:
        self._lake = lake
        self._control = control
        self._locks = locks

    async def recall(self, group_id: str) -> Group | None:
        """Bring a group into `Control`, unless it is there or was never registered."""
        if group_id not in self._control.groups:
            async with self._locks.of(group_id):
                if group_id not in self._control.groups:
                    for event in await self._events([group_id]):
                        self._control.apply(event)
        group = self._control.groups.get(group_id)
        if group is not None and group.state != "open":
            self._control.used(group_id)
        return group

    async def look_up(self, names: Iterable[str]) -> dict[str, Group]:
        """Groups by id, for reading only: those that are not in memory do not stay there."""
        names = list(names)
        missing = [name for name in names if name not in self._control.groups]
        past = Control(len(missing))
        if missing:
            for event in await self._events(missing):
                past.apply(event)
        known = past.groups | self._control.groups
        return {name: known[name] for name in names if name in known}

    async def _events(self, names: list[str]) -> list[dict[str, Any]]:
        """The index was up to date at the start; what came since is in memory, unless it was evicted."""
        evicted = self._control.evicted
        refresh = len(evicted) > _EVICTED or not evicted.isdisjoint(names)
        if refresh:
            evicted.clear()
        return await asyncio.to_thread(self._lake.events_of, names, refresh=refresh)
