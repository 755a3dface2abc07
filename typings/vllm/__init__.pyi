# vLLM is not in the environment that is checked, and what is used of it is not what its types promise: Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
