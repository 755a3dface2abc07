"""Replay of a mixture-of-experts model: the experts that took each token are staged as the engine chose them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from tests.vllm.conftest import PYTHON, ROOT, WITHOUT_A_GPU
from tokenlake.ingest.routed_experts import NAME, read_routed_experts


def test_every_token_of_a_chain_has_the_experts_that_took_it(tmp_path: Path) -> None:
    assert PYTHON is not None
    ran = subprocess.run(
        [PYTHON, "-m", "tests.vllm.routed", str(tmp_path / "moe")],
        cwd=ROOT,
        env={**os.environ, **WITHOUT_A_GPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["faults"] == [None, None]
    first, second = (extras[NAME] for extras in said["extras"])
    before, whole = said["lengths"]
    assert (first["start"], first["shape"]) == (0, [before - 1, 2, 2])
    assert (second["start"], second["shape"]) == (before - 1, [whole - before, 2, 2])
    chain = np.concatenate([read_routed_experts(first), read_routed_experts(second)])
    assert np.array_equal(np.sort(chain), np.sort(np.array(said["routed"])[: whole - 1])), "as transformers routes them"
