"""What the commands that keep a lake in shape do: compact, gc, backup, export."""

from __future__ import annotations

import argparse
import sys
import time

from tokenlake.errors import ConfigError, StorageFailed
from tokenlake.store.backup import back_up
from tokenlake.store.compact import Compaction
from tokenlake.store.export import Exporter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.objects import Objects
from tokenlake.store.reader import Lake
from tokenlake.store.retention import Retention, retire, retire_named

__all__ = ["backup", "compact", "export", "gc"]

_LONGEST_S = 1_000_000


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _told(done: Compaction) -> str:
    return (
        f"{done.replaced} segments became {done.written}, {done.bytes_before} bytes became {done.bytes_after}: "
        f"{done.records} records kept, {done.retired} removed"
    )


def compact(arguments: argparse.Namespace) -> int:
    """`tokenlake compact`."""
    with OwnedLake.open(arguments.lake, create=False) as lake:
        _say(_told(lake.compact()))
    return 0


def gc(arguments: argparse.Namespace) -> int:
    """`tokenlake gc`: by rule, or by name."""
    rule = Retention(
        older_than_s=arguments.older_than, below_version=arguments.below_version, consumed=arguments.consumed
    )
    named = bool(arguments.group or arguments.rollout)
    if named and rule != Retention():
        raise ConfigError("give conditions, or name groups and rollouts, not both")
    with OwnedLake.open(arguments.lake, create=False) as lake:
        done = retire_named(lake, groups=arguments.group, rollouts=arguments.rollout) if named else retire(lake, rule)
    _say(f"retired {len(done.groups)} groups and {len(done.rollouts)} single rollouts")
    _say(_told(done.compaction))
    return 0


def backup(arguments: argparse.Namespace) -> int:
    """`tokenlake backup`."""
    done = back_up(arguments.lake, arguments.target)
    _say(f"copied {done.files} files, {done.bytes} bytes, to {arguments.target}")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """`tokenlake export`: once, or for ever, over a store that is away for a while too."""
    if arguments.every is not None and not 0 < arguments.every <= _LONGEST_S:
        raise ConfigError(f"--every is a number of seconds above 0, at most {_LONGEST_S}")
    store = Objects(arguments.uri)
    with Lake(arguments.lake) as lake:
        exporter = Exporter(lake, store)
        while True:
            try:
                done = exporter.run()
                if done.groups or arguments.every is None:
                    _say(f"exported {done.groups} groups, {done.bytes} bytes in {done.files} files, to {store.name}")
            except StorageFailed as error:
                if arguments.every is None:
                    raise
                sys.stderr.write(f"tokenlake: {error.message}; it is tried again\n")
            if arguments.every is None:
                return 0
            time.sleep(arguments.every)
