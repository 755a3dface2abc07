# reasoning_gym ships no types: Any, as pyarrow.
from typing import Any

def __getattr__(name: str) -> Any: ...
