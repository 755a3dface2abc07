"""`tokenlake audit`: the findings of a whole lake, and the line that pins it."""

from __future__ import annotations

import argparse
import dataclasses
import hmac
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tokenlake.api.output import write_table
from tokenlake.errors import ConfigError
from tokenlake.store.audit import AuditSummary, LakeAudit, signature

__all__ = ["audit"]

_DIGEST = re.compile(r"[0-9a-f]{64}")


def audit(arguments: argparse.Namespace) -> int:
    """`tokenlake audit`: 0 healthy, 1 faults found or another lake than expected, 2 nothing to audit."""
    key = None if arguments.key_file is None else _key(arguments.key_file)
    expected = None if arguments.expect is None else _expected(arguments.expect, key)
    with LakeAudit(arguments.lake, state=arguments.resume) as checking:
        summary = checking.run(_progress())
        findings = checking.findings()
    if not summary.groups and not summary.calls and not findings.num_rows:
        sys.stderr.write(f"tokenlake: nothing to audit in {arguments.lake}: 0 records checked\n")
        return 2
    if arguments.summary:
        sys.stdout.write(json.dumps(_line(summary, key)) + "\n")
    else:
        write_table(findings, arguments.format, sys.stdout.buffer)
    sys.stderr.write(
        f"checked {summary.calls} calls and {summary.rows} rows of {summary.groups} groups: {summary.faults} faults, "
        f"{summary.notices} notices; digest {summary.digest}\n"
    )
    other = expected is not None and expected != summary.digest
    if other:
        sys.stderr.write(f"tokenlake: {arguments.lake} is not what was expected, which had the digest {expected}\n")
    return 1 if summary.faults or other else 0


def _line(summary: AuditSummary, key: bytes | None) -> dict[str, Any]:
    line = dataclasses.asdict(summary)
    return line if key is None else line | {"signature": signature(key, summary.lake_id, summary.digest)}


def _key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the key cannot be read from {path}: {error.strerror}") from error
    if not key:
        raise ConfigError(f"{path} holds no key: put a secret text in it")
    return key


def _expected(given: str, key: bytes | None) -> str:
    """The digest that is given, or that a file with a summary line holds; with a key only if the key signed it."""
    if _DIGEST.fullmatch(given) and key is None:
        return given
    try:
        found = json.loads(Path(given).read_bytes())
        line = cast("dict[str, Any]", found)
        digest, lake_id, signed = line["digest"], line["lake_id"], line.get("signature")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--expect {given!r} is no digest and no file with a line of `audit --summary`") from error
    if key is not None and not hmac.compare_digest(str(signed), signature(key, str(lake_id), str(digest))):
        raise ConfigError(f"{given} was not signed with this key: nothing was compared")
    return str(digest)


def _progress() -> Callable[[int, int], None] | None:
    """Tells a terminal how far the audit is; anything else gets the result alone."""
    if not sys.stderr.isatty():
        return None

    def tell(done: int, due: int) -> None:
        sys.stderr.write(f"\raudited {done} of {due} groups" + ("\n" if done == due else ""))
        sys.stderr.flush()

    return tell
