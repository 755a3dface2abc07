from nemo_gym.token_id_capture.records import TokenEntry

class TokenCaptureSnapshot:
    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
    def __init__(
        self, *, rollout_id: str, entries: tuple[TokenEntry, ...], incomplete: bool, snapshot_id: str, version: int
    ) -> None: ...
