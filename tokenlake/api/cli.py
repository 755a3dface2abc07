"""The `tokenlake` command: every door to a lake that needs no HTTP.

Reading commands open the lake read-only and work beside a running service. Commands that write need to own it and
refuse in one line when another process does. Errors are one line on standard error; `--debug` adds the traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenlake.errors import TokenlakeError
from tokenlake.program import program_version

__all__ = ["main"]

_OK, _REFUSED = 0, 2
_WORKERS = {"vllm": "tokenlake.ingest.vllm.launcher:run", "tiny": "tokenlake.ingest.tiny.worker:run"}
"""The one command that takes arguments of another program, by what samples there."""


def _lake(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lake", type=Path, required=True, metavar="DIR", help="the lake's directory")


def _format(parser: argparse.ArgumentParser, *choices: str) -> None:
    parser.add_argument("--format", choices=choices, default=choices[0], help="how to print (default: %(default)s)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenlake", description="Token-exact capture of agent rollouts, as SQL-queryable training rows."
    )
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    parser.add_argument("--version", action="version", version=program_version(), help="print which Tokenlake this is")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: str, text: str) -> argparse.ArgumentParser:
        made = sub.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return made

    demo = command("demo", "tokenlake.api.demo.run:run", "run the whole loop on this machine and prove the rows right")
    demo.add_argument("--lake", type=Path, metavar="DIR", help="where to keep the lake (default: a temporary one)")
    demo.add_argument("--groups", type=int, default=8)
    demo.add_argument("--rollouts", type=int, default=4)
    demo.add_argument("--engine", choices=("tiny", "vllm"), default="tiny")
    demo.add_argument("--vllm-python", default=sys.executable, metavar="PYTHON", help="an interpreter that has vLLM")
    demo.add_argument("--seed", type=int, default=0)

    serve = command("serve", "tokenlake.api.serve:run", "the gate and the REST API over one lake")
    _lake(serve)
    source = serve.add_mutually_exclusive_group()
    source.add_argument("--engine", choices=("tiny",), default="tiny", help="the embedded model (default)")
    source.add_argument("--upstream", metavar="URL", help="an OpenAI-compatible server, e.g. vLLM")
    serve.add_argument(
        "--capture",
        choices=("worker", "gate", "off"),
        help="where: worker (default with --engine), gate (default with --upstream), or not at all",
    )
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the service")
    serve.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="a policy of the lake")

    worker = command("worker", _WORKERS["vllm"], "vLLM that captures what it samples")
    worker.allow_abbrev = False
    _lake(worker)
    worker.add_argument("--engine", choices=tuple(_WORKERS), default="vllm", help="tiny: the embedded model instead")
    worker.add_argument(
        "--worker-id", default="worker-0", metavar="ID", help="also names its deltas (default: worker-0)"
    )
    worker.add_argument("--prefix-cache-bytes", type=int, default=67_108_864, help="memory for parents' exact ids")
    worker.add_argument("--with-parent", action="store_true", help="end when standard input does")

    imported = command(
        "import", "tokenlake.api.commands:import_file", "captured calls from elsewhere, whole file or nothing"
    )
    _lake(imported)
    imported.add_argument(
        "--from", dest="source", choices=("nemo-gym", "traces"), help="who wrote it, if not Tokenlake"
    )
    imported.add_argument("file", type=Path, metavar="FILE.jsonl")

    finalize = command("finalize", "tokenlake.api.commands:finalize", "publish every group that is due")
    _lake(finalize)
    finalize.add_argument("--group", action="append", metavar="G", help="only this group; may be repeated")
    finalize.add_argument("--actors", type=int, metavar="N", help="judge them in N actors of a running Ray")
    finalize.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE", help="change a policy first")

    rows = command("rows", "tokenlake.api.commands:rows", "ready rows")
    _lake(rows)
    rows.add_argument("--group", metavar="G")
    _format(rows, "jsonl", "arrow", "parquet", "hf")
    rows.add_argument("--out", type=Path, metavar="PATH", help="write there instead of standard output; hf: a folder")

    query = command("sql", "tokenlake.api.commands:query", "read-only SQL over all views")
    _lake(query)
    _format(query, "table", "jsonl", "csv", "arrow")
    query.add_argument("query", metavar="SELECT")

    audit = command("audit", "tokenlake.api.auditing:audit", "verify everything again from the bytes")
    _lake(audit)
    _format(audit, "table", "jsonl")
    audit.add_argument("--resume", type=Path, metavar="STATE", help="a folder to go on from if this is interrupted")
    audit.add_argument("--summary", action="store_true", help="print one line that pins the lake, not the findings")
    audit.add_argument(
        "--expect", metavar="DIGEST", help="1 unless the lake has this digest, or that of a summary file"
    )
    audit.add_argument("--key-file", type=Path, metavar="FILE", help="a secret that signs the summary")

    inspect = command(
        "inspect", "tokenlake.api.inspect:inspect", "one rollout: its call tree, terminal chain and verdict"
    )
    _lake(inspect)
    inspect.add_argument("rollout_id", metavar="ROLLOUT_ID")
    inspect.add_argument("--tokens", type=int, default=0, metavar="N", help="also the first N tokens of the chain")

    diff = command("diff", "tokenlake.api.lake_diff:diff", "where the rows of two lakes differ")
    diff.add_argument("lake_a", type=Path, metavar="LAKE_A")
    diff.add_argument("lake_b", type=Path, metavar="LAKE_B")
    diff.add_argument("--group", metavar="G", help="only this group")
    _format(diff, "table", "jsonl")
    diff.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="logprobs this close are the same")

    compact = command("compact", "tokenlake.api.upkeep:compact", "rewrite small batches as large ones")
    _lake(compact)

    gc = command("gc", "tokenlake.api.upkeep:gc", "remove the deltas of closed groups; rows and lineage stay")
    _lake(gc)
    gc.add_argument("--older-than", type=float, metavar="SECONDS", help="closed this long ago")
    gc.add_argument("--below-version", type=int, metavar="V", help="the group's newest weight version is below this")
    gc.add_argument("--consumed", action="store_true", help="a consumer has consumed its rows")
    gc.add_argument("--group", action="append", default=[], metavar="G", help="this group; may be repeated")
    gc.add_argument("--rollout", action="append", default=[], metavar="R", help="this rollout; may be repeated")

    backup = command("backup", "tokenlake.api.upkeep:backup", "a consistent copy, also while a service writes")
    _lake(backup)
    backup.add_argument("target", type=Path, metavar="TARGET", help="the copy's directory; it must not exist yet")

    export = command("export", "tokenlake.api.upkeep:export", "ready rows to an object store, what is not there yet")
    _lake(export)
    export.add_argument("uri", metavar="URI", help="s3://bucket/folder, gs://, abfs://, fsspec+...://, or a folder")
    export.add_argument("--every", type=float, metavar="SECONDS", help="go on, and look for new rows this often")

    rebuild = command(
        "rebuild", "tokenlake.api.commands:rebuild", "drop the index and build it again from the Arrow files"
    )
    _lake(rebuild)
    return parser


def _command(entry: str) -> Callable[[argparse.Namespace], int]:
    """The function behind a command; loaded when it runs, because some need an extra and most do not."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    arguments, arguments.rest = parser.parse_known_args(argv)
    if arguments.run in _WORKERS.values():
        arguments.run = _WORKERS[arguments.engine]
    elif arguments.rest:
        parser.error(f"unrecognized arguments: {' '.join(arguments.rest)}")
    try:
        return _command(arguments.run)(arguments)
    except TokenlakeError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"tokenlake: {' '.join(error.message.split())}", file=sys.stderr)
        return _REFUSED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
