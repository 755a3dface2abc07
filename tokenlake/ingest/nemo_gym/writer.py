"""A process's own writer of what NeMo-Gym hands over, beside any number of others over the same lake."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
from pathlib import Path

from tokenlake.ingest.capture import CaptureCore, ParentLink
from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.staged import open_staged

__all__ = ["ENVELOPE", "GymWriter", "link_to"]

ENVELOPE = "nemo_gym"
"""The key of a delta's extras that holds what NeMo-Gym says of a call and the lake has no column for."""
_REMEMBERED = 4096
"""Keys by which a repeated call is known without a look at the disk."""


class GymWriter:
    """Stages under a writer name that no other process has, made with the first call. Thread-safe.

    Raises `NotFound` where there is no lake, `FormatError` for a newer one.
    """

    def __init__(self, lake: str | os.PathLike[str], writer: str | None = None) -> None:
        self.root = Path(lake)
        self.staged = open_staged(lake)
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        self._name = writer or f"gym-{host}-{os.getpid()}-{secrets.token_hex(3)}"
        self._lock = threading.Lock()
        self._writer: DeltaWriter | None = None

    @property
    def core(self) -> CaptureCore:
        """The capture core over the writer."""
        with self._lock:
            if self._writer is None:
                self._writer = DeltaWriter(self.root, self._name, remember=_REMEMBERED)
            return CaptureCore(self._writer)

    def close(self) -> None:
        """Seal what was written. Idempotent."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
            self.staged.close()


def link_to(parent: Delta) -> ParentLink:
    """The link of a call that continues a staged one."""
    return ParentLink(
        call_id=parent.call_id,
        root_call_id=parent.root_call_id,
        depth=parent.depth,
        cum_len=parent.cum_len,
        chain_hash=parent.chain_hash,
    )
