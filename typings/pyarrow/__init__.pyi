# pyarrow ships no types, and the stubs that others publish lag releases behind it and disagree with its generics: here
# it is Any, said once, so that the rest of the package stays strict.
from typing import Any

def __getattr__(name: str) -> Any: ...
