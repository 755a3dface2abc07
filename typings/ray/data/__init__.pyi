# As the package, Any; but what is derived from.
from typing import Any

class Datasource:
    def __init__(self) -> None: ...

def __getattr__(name: str) -> Any: ...
