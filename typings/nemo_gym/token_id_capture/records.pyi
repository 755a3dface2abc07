from enum import StrEnum
from typing import Any

class ParentResolutionStatus(StrEnum):
    ROOT = "root"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"

class TokenEntry:
    rollout_id: str
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    response_id: str | None
    parent_call_id: str | None
    parent_resolution: ParentResolutionStatus | None
    prompt_is_delta: bool
    model_extra: dict[str, Any] | None
    def __init__(self, **fields: Any) -> None: ...
    def model_dump(self, *, mode: str, exclude: set[str]) -> dict[str, Any]: ...
