"""A trainer as a process of its own, to be killed anywhere: `claiming_trainer.py URL TOKEN CHECKPOINT_FILE GROUPS`.

It keeps to the protocol of docs/training.md: write the checkpoint, then consume; when it starts again, consume what its
checkpoint holds, then rewind to it. It ends once it has trained on as many groups as there will ever be. A line is
printed before and after everything that can be interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from tokenlake.api.client import Client
from tokenlake.errors import Conflict, InvalidInput, NotFound, TokenlakeError

RETRY_S = 60.0


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def insist(call: Callable[[], Any]) -> Any:
    """The answer of an idempotent call, from whichever service is there."""
    while True:
        try:
            return call()
        except (httpx.TransportError, TokenlakeError) as error:
            if isinstance(error, Conflict | NotFound | InvalidInput):
                raise
            say("again")


def consume(client: Client, state: dict[str, Any]) -> None:
    insist(lambda: client.consume(state["claim_id"], checkpoint=f"step-{state['step']}"))


def train(client: Client, file: Path, groups: int) -> None:
    state: dict[str, Any] = {"step": 0, "rows": [], "groups": [], "claim_id": None}
    if file.exists():
        state = json.loads(file.read_text())
        consume(client, state)
    checkpoint = f"step-{state['step']}" if state["step"] else None
    insist(lambda: client.rewind("t", checkpoint=checkpoint))
    while len(state["groups"]) < groups:
        key = uuid4().hex
        say("claiming")
        claim = insist(lambda key=key: client.claim("t", groups=2, idempotency_key=key))
        say("claimed")
        if not claim["groups"]:
            continue
        for group in claim["groups"]:
            table, _ = insist(lambda group=group: client.rows(group_id=group["group_id"]))
            state["rows"] += table.column("sample_id").to_pylist()
            state["groups"].append(group["group_id"])
        state |= {"step": state["step"] + 1, "claim_id": claim["claim_id"]}
        say("writing")
        written = file.with_suffix(".new")
        written.write_text(json.dumps(state))
        written.replace(file)
        say("written")
        consume(client, state)
        say("consumed")


if __name__ == "__main__":
    url, token, name, number = sys.argv[1:]
    with Client(url, token, retry_s=RETRY_S) as made:
        train(made, Path(name), int(number))
    os._exit(0)
