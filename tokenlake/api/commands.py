"""What the commands over a lake do: import, finalize, rows, sql, rebuild."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tokenlake import finalize as finalizer
from tokenlake import sql
from tokenlake.api.hf_export import save_dataset
from tokenlake.api.output import write_table
from tokenlake.errors import ConfigError, InvalidInput, NotFound
from tokenlake.finalize import publish
from tokenlake.ingest import importer
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake

__all__ = ["finalize", "import_file", "pairs", "query", "rebuild", "rows"]


def pairs(settings: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` arguments as a mapping; raises `ConfigError` for another shape."""
    parsed: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"{setting!r} is not NAME=VALUE")
        parsed[name] = value
    return parsed


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def import_file(arguments: argparse.Namespace) -> int:
    """`tokenlake import`."""
    if not arguments.file.is_file() and not (arguments.source and arguments.file.is_dir()):
        raise InvalidInput(f"no file {arguments.file}")
    lake = OwnedLake.open(arguments.lake)
    try:
        done = importer.import_file(lake, arguments.file, source=arguments.source)
    finally:
        lake.close()
    _say(
        f"imported {done.groups} groups, {done.calls} calls, {done.seals} seals, {done.fails} fails; "
        f"{done.unchanged} records were there already"
    )
    return 0


def finalize(arguments: argparse.Namespace) -> int:
    """`tokenlake finalize`."""
    lake = OwnedLake.open(arguments.lake, create=False)
    try:
        publish.set_policy(lake, pairs(arguments.policy))
        with contextlib.ExitStack() as held:
            judges = None
            if arguments.actors is not None:
                judges = held.enter_context(finalizer.FinalizerPool(lake.path, actors=arguments.actors))
            groups = publish.publish_due(lake, groups=arguments.group, judges=judges)
    finally:
        lake.close()
    for group in groups:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(group.reasons.items()))
        if group.dropped is not None:
            _say(f"{group.group_id}: dropped ({group.dropped})")
        else:
            _say(f"{group.group_id}: {group.n} rollouts, {group.valid} valid{'; ' + reasons if reasons else ''}")
    _say(f"published {sum(1 for group in groups if group.dropped is None)} groups")
    return 0


def rows(arguments: argparse.Namespace) -> int:
    """`tokenlake rows`."""
    lake = Lake(arguments.lake)
    try:
        if arguments.group is not None and lake.sql(sql.read("reads/group"), [arguments.group]).fetchall() == []:
            raise NotFound(f"no group {arguments.group} in {arguments.lake}")
        if arguments.format == "hf":
            if arguments.out is None:
                raise InvalidInput("--format hf writes a folder: name it with --out DIR")
            save_dataset(lake, arguments.group, arguments.out)
            return 0
        found = lake.sql(sql.read("reads/rows"), [arguments.group])
        if arguments.out is None:
            write_table(found.to_arrow_table(), arguments.format, sys.stdout.buffer)
        else:
            _write_file(found.to_arrow_table(), arguments.format, arguments.out)
    finally:
        lake.close()
    return 0


def _write_file(table: pa.Table, form: str, path: Path) -> None:
    """Write beside the target and rename, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as out:
            write_table(table, form, out)
        temporary.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from error


def query(arguments: argparse.Namespace) -> int:
    """`tokenlake sql`."""
    lake = Lake(arguments.lake)
    try:
        write_table(lake.fetch(arguments.query), arguments.format, sys.stdout.buffer)
    finally:
        lake.close()
    return 0


def rebuild(arguments: argparse.Namespace) -> int:
    """`tokenlake rebuild`."""
    lake = OwnedLake.open(arguments.lake, create=False)
    try:
        seconds = lake.rebuild()
    finally:
        lake.close()
    _say(f"rebuilt the index of {arguments.lake} in {seconds:.2f} s")
    return 0
