"""Publishing in the background: groups whose rollouts have ended at once, others at their deadline.

What a row is, is decided in `tokenlake.finalize`; this only calls it, one run at a time in a thread, and tells the gate
which groups are closed. While a group is published no command of it runs: each comes before or finds it closed. A run
that fails, for whatever reason, is logged, counted and tried again at the next tick, each group by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress

from tokenlake import sql
from tokenlake.api.control import Control
from tokenlake.api.lifecycle import Lifecycle
from tokenlake.api.metrics import Metrics
from tokenlake.api.registration import GroupLocks
from tokenlake.api.rollouts import Group
from tokenlake.api.settings import Settings
from tokenlake.api.traces import Traces
from tokenlake.clock import now_us
from tokenlake.errors import Conflict, NotFound, TokenlakeError
from tokenlake.finalize.judge import Judges
from tokenlake.finalize.publish import PublishedGroup, publish_due
from tokenlake.store.lake import OwnedLake
from tokenlake.store.query import fetch

__all__ = ["Publisher"]

_log = logging.getLogger(__name__)


class Publisher:
    """Watches groups and publishes those that are due."""

    def __init__(
        self,
        lake: OwnedLake,
        control: Control,
        locks: GroupLocks,
        metrics: Metrics,
        settings: Settings,
        traces: Traces,
    ) -> None:
        self._lake = lake
        self._control = control
        self._locks = locks
        self._metrics = metrics
        self._settings = settings
        self._traces = traces
        self._wake = asyncio.Event()
        self._one = asyncio.Lock()
        self._running: asyncio.Future[list[PublishedGroup]] | None = None
        self.lifecycle: Lifecycle | None = None
        """Ends attempts whose time to live has passed; set once, by the service."""
        self.judges: Judges | None = None
        """Who judges groups, where this process does not; set once, by the service."""

    def ended(self, group_id: str) -> None:
        """A rollout of this group has ended: look at it soon."""
        group = self._control.groups.get(group_id)
        if group is not None and group.due:
            self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        together = True
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._settings.tick_s)
            self._wake.clear()
            try:
                await self._expire()
                await self._publish_what_is_due(together=together)
                together = True
            except Exception as error:  # noqa: BLE001 - the border of the background: nobody else would hear of it
                together = False
                self._metrics.finalize_failures.labels(type(error).__name__).inc()
                _log.exception("publishing failed and is tried again")
                await asyncio.sleep(self._settings.tick_s)

    async def _publish_what_is_due(self, *, together: bool) -> None:
        """Publish groups that are due; not `together`, the first failure does not keep the others from it."""
        due = [
            group.group_id
            for group in self._control.groups.values()
            if self._is_due(group) and not self._locks.of(group.group_id).locked()
        ]
        failure: Exception | None = None
        for names in [due] if together else [[name] for name in due]:
            try:
                await self.publish(names)
            except Exception as error:  # noqa: BLE001 - raised again, when the others have had their turn
                failure = error
        if failure is not None:
            raise failure

    async def publish(self, groups: Iterable[str], *, force_deadline: bool = False) -> list[PublishedGroup]:
        """Publish these groups now, as far as they are due. Once begun it is not undone by cancellation."""
        self._running = asyncio.ensure_future(self._publish(list(groups), force_deadline))
        return await asyncio.shield(self._running)

    async def settle(self) -> None:
        """Wait for a run that is going on."""
        async with self._one:
            return

    async def _publish(self, names: list[str], force_deadline: bool) -> list[PublishedGroup]:
        async with self._one, AsyncExitStack() as held:
            for name in sorted(names):
                await held.enter_async_context(self._locks.of(name))
            names = [
                name for name in names if name in self._control.groups and self._control.groups[name].state == "open"
            ]
            if not names:
                return []
            for name in names:
                self._close(self._control.groups[name], closing=True)
            began = time.monotonic()
            try:
                with self._traces.span("publish", group_ids=" ".join(names)):
                    done = await asyncio.to_thread(
                        publish_due,
                        self._lake,
                        groups=names,
                        now=now_us(),
                        force_deadline=force_deadline,
                        judges=self.judges,
                    )
            finally:
                for name in names:
                    self._close(self._control.groups[name], closing=False)
            self._metrics.finalize.observe(time.monotonic() - began)
            for group in done:
                rollouts = self._control.groups[group.group_id].rollouts.values()
                self._metrics.expired.inc(sum(not rollout.current.ended for rollout in rollouts))
                kind = "group_published" if group.dropped is None else "group_dropped"
                self._control.apply({"event_type": kind, "group_id": group.group_id})
            for group in done:
                self._count(group)
            return done

    async def publish_now(self, group_id: str) -> PublishedGroup:
        """Publish one group whose deadline is taken as passed; says the same again of one that is published.

        Raises `Conflict` for a group that was dropped.
        """
        group = self._control.groups.get(group_id)
        if group is None:
            raise NotFound(f"no group {group_id}", group_id=group_id)
        done = await self.publish([group_id], force_deadline=True)
        if done:
            return done[0]
        if group.state != "published":
            raise Conflict(f"group {group_id} is {group.state}", group_id=group_id)
        text = sql.read("reads/ready_rows_of")
        rows = await asyncio.to_thread(fetch, self._lake, text, [[group_id]], groups=[group_id])
        reasons = Counter(reason for reason in rows.column("reason").to_pylist() if reason is not None)
        return PublishedGroup(
            group_id=group_id,
            n=group.n,
            rows=rows.num_rows,
            valid=group.n - reasons.total(),
            reasons=dict(reasons),
            dropped=None,
            group_min_wv=rows.column("group_min_wv")[0].as_py(),
            group_max_wv=rows.column("group_max_wv")[0].as_py(),
        )

    def _is_due(self, group: Group) -> bool:
        if group.state != "open":
            return False
        return group.due or (group.deadline_at is not None and group.deadline_at <= now_us())

    @staticmethod
    def _close(group: Group, *, closing: bool) -> None:
        """Nothing is admitted while a group is being published."""
        for rollout in group.rollouts.values():
            rollout.current.closing = closing

    def _count(self, group: PublishedGroup) -> None:
        if group.dropped is not None:
            return
        if group.group_min_wv is not None and group.group_max_wv is not None:
            self._metrics.spread.set(group.group_max_wv - group.group_min_wv)
        self._metrics.rows.labels("true", "").inc(group.rows - sum(group.reasons.values()))
        for reason, count in group.reasons.items():
            self._metrics.rows.labels("false", reason).inc(count)
        self._metrics.delivered.set(group.valid / group.n)

    async def _expire(self) -> None:
        """Fail attempts that had no call and no end for their time to live."""
        if self.lifecycle is None:
            return
        before = now_us() - int(self._settings.rollout_ttl_s * 1e6)
        for group in list(self._control.groups.values()):
            if group.state != "open":
                continue
            for rollout in list(group.rollouts.values()):
                attempt = rollout.current
                if not attempt.ended and not attempt.inflight and attempt.touched_at < before:
                    self._metrics.expired.inc()
                    try:
                        await self.lifecycle.fail(
                            rollout.rollout_id, reason="never_sealed", attempt=attempt.attempt, retry=False
                        )
                    except TokenlakeError as error:
                        _log.warning("rollout %s could not be expired: %s", rollout.rollout_id, error.message)
