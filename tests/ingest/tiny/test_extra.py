"""What a missing dependency says."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["jinja2", "safetensors", "tokenizers", "torch"])
@pytest.mark.parametrize("module", ["tokenlake.ingest.tiny", "tokenlake.ingest.tiny.score"])
def test_a_missing_package_is_named_with_its_cure(package: str, module: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from tokenlake.errors import MissingExtra
try:
    import {module}
except MissingExtra as missing:
    assert isinstance(missing, ImportError)
    print(missing)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "."}
    )
    assert "pip install 'tokenlake[torch]'" in done.stdout
    assert repr(package) in done.stdout


def test_the_contract_imports_no_torch() -> None:
    code = "import sys, tokenlake.ingest.engine; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "."}
    )
    assert done.stdout == "False\n"
