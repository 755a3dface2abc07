# Ray passes objects of the caller through as what it cannot name: Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
