from typing import Any, Self

class StagedCallBaseSnapshot:
    schema_version: int
    rollout_id: str
    model_call_id: str
    parent_call_id: str | None
    mode: str
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int
    digest: str
    token_ids_delta: list[int]
    token_mask_delta: list[float]
    generation_log_probs_delta: list[float]
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    @property
    def staging_key(self) -> str: ...
    @classmethod
    def model_construct(cls, **fields: Any) -> Self: ...

class StagedCallRecord(StagedCallBaseSnapshot):
    extras: dict[str, Any] | None

class StageResult:
    def __init__(self, *, ok: bool, staging_key: str | None = None, error: str | None = None) -> None: ...

class CallRecord:
    model_call_id: str
    response_id: str
    digest: str

class RolloutReceipt:
    rollout_id: str
    reward: float | None
    terminal_model_call_id: str | None
    terminal_selection: str | None
    manifest: list[CallRecord]
    capture_poisoned: bool
    failure_reason: str | None
