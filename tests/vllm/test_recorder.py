"""What vLLM's engine does not say wrong: a stand-in says it in vLLM's own words, and a worker records it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import tokenlake
from tests.vllm.conftest import PYTHON, ROOT, WITHOUT_A_GPU

FAILED = {
    "no log-probabilities": "logprobs_missing",
    "none of one token": "logprobs_missing",
    "one too few": "logprobs_misaligned",
    "one too many": "logprobs_misaligned",
    "not a number": "logprob_not_finite",
    "no prompt": "prompt_ids_missing",
    "another prompt": "prompt_ids_differ",
    "an id below zero": "token_id_invalid",
    "two choices": "choices_invalid",
    "the second choice": "choices_invalid",
    "versions of fewer tokens": "versions_invalid",
}
STAGED = {"sound": 2, "nothing": 0, "past a stop text": 3}


def test_what_is_missing_or_contradicts_itself_fails_and_what_is_odd_is_taken(tmp_path: Path) -> None:
    """B16, B20, B23: each by its name; a client that goes while its call is staged cuts no record in half."""
    assert PYTHON is not None
    ran = subprocess.run(
        [PYTHON, "-m", "tests.vllm.lying", str(tmp_path / "lake")],
        cwd=ROOT,
        env={**os.environ, **WITHOUT_A_GPU, "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said.pop("cut short while staging") == ["CancelledError", "staged", None, 2]
    for refused in ("aborted", "a prompt that was changed"):
        assert said.pop(refused) == ["RetryableRequestError", None, None]
    assert said == {name: ["staged", None, sampled] for name, sampled in STAGED.items()} | {
        name: ["capture_failed", reason, 0] for name, reason in FAILED.items()
    }
    with tokenlake.open(tmp_path / "lake") as lake:
        assert lake.sql("SELECT count(*) FROM deltas").fetchall() == [(len(STAGED) + 1,)]
