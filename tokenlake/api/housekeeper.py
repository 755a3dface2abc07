"""Upkeep while the service runs: compaction and retention, in a thread, one run at a time.

Model calls go on meanwhile: a run holds no lock that they wait for but for the footer of one segment. A run that a
backup keeps away, that the disk refuses, or that breaks, is logged, counted and tried again the next time.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tokenlake.api.control import Control
from tokenlake.api.metrics import Metrics
from tokenlake.api.settings import Settings
from tokenlake.errors import TokenlakeError
from tokenlake.store.compact import Compaction
from tokenlake.store.lake import OwnedLake
from tokenlake.store.retention import Retention, retire

__all__ = ["Housekeeper"]

_log = logging.getLogger(__name__)


class Housekeeper:
    """Compacts a lake and retires its closed groups, as the settings say."""

    def __init__(self, lake: OwnedLake, control: Control, metrics: Metrics, settings: Settings) -> None:
        self._lake = lake
        self._control = control
        self._metrics = metrics
        self._settings = settings
        self._running: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Keep the lake in shape until cancelled."""
        every = self._settings.compact_every_s
        if every is None:
            return
        while True:
            await asyncio.sleep(every)
            self._running = asyncio.ensure_future(asyncio.to_thread(self._once, self._rule()))
            await asyncio.shield(self._running)

    async def settle(self) -> None:
        """Wait for a run that is going on."""
        if self._running is not None:
            await self._running

    def _rule(self) -> Retention | None:
        """What retention removes now; None: nothing."""
        closed_s, versions = self._settings.retain_closed_s, self._settings.retain_versions
        if closed_s is None and versions is None:
            return None
        below = None
        if versions is not None:
            if self._control.weight_version is None:
                return None
            below = max(0, self._control.weight_version - versions + 1)
        return Retention(older_than_s=closed_s, below_version=below, consumed=self._settings.retain_until == "consumed")

    def _once(self, rule: Retention | None) -> None:
        """One run; in a thread."""
        began = time.monotonic()
        groups: tuple[str, ...] = ()
        try:
            if rule is not None:
                retired = retire(self._lake, rule, min_records=self._settings.compact_min_records)
                groups, done = retired.groups, retired.compaction
            else:
                done = self._lake.compact(min_records=self._settings.compact_min_records)
            self._lake.snapshot()
        except Exception as error:  # noqa: BLE001 - the border of the background: nobody else would hear of it
            known = isinstance(error, TokenlakeError)
            self._metrics.upkeep_failures.labels(type(error).__name__).inc()
            _log.warning(
                "upkeep failed and is tried again in %g s: %s",
                *(self._settings.compact_every_s, error.message if known else type(error).__name__),
                exc_info=not known,
            )
            return
        seconds = time.monotonic() - began
        self._metrics.upkept(done, len(groups), seconds)
        if done != Compaction() or groups:
            _log.info(
                "upkeep: %d groups retired, %d segments became %d, %d records kept, %d removed, %d bytes became %d, "
                "%.2f s",
                *(len(groups), done.replaced, done.written, done.records, done.retired),
                *(done.bytes_before, done.bytes_after, seconds),
            )
