"""How a rollout is named: in a run body of NeMo-Gym, in the URL that its agent calls, and in a lake."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenlake.errors import InvalidInput
from tokenlake.ids import check_group_id, check_rollout_id

__all__ = ["ROLLOUT_KEY", "gym_rollout_id", "lake_place", "rollout_base_url"]

ROLLOUT_KEY = "_ng_rollout_id"
"""The key of a run body that names its rollout."""
_TASK, _ROLLOUT, _ATTEMPT = "_ng_task_index", "_ng_rollout_index", "_ng_attempt_index"

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GROUPED = re.compile(r"(?P<rollout>.+_g(?:0|[1-9][0-9]{0,6}))(?:-a(?P<attempt>[1-9][0-9]{0,6}))?")
_COUNTED = re.compile(r"(?P<task>[0-9]+)-(?P<index>0|[1-9][0-9]{0,6})(?:-a(?P<attempt>[1-9][0-9]{0,6}))?")


def gym_rollout_id(body: Mapping[str, Any]) -> str | None:
    """What NeMo-Gym calls the rollout of a run body; None where the body names none.

    `_ng_rollout_id`, else `{_ng_task_index}-{_ng_rollout_index}`; a later attempt has `-a{_ng_attempt_index}` behind.
    Raises `InvalidInput` for a name that NeMo-Gym refuses.
    """
    name = body.get(ROLLOUT_KEY)
    if name is None:
        if body.get(_TASK) is None or body.get(_ROLLOUT) is None:
            return None
        name = f"{body[_TASK]}-{body[_ROLLOUT]}"
    if not isinstance(name, str) or _SAFE.fullmatch(name) is None:
        raise InvalidInput(f"{ROLLOUT_KEY} is not a rollout id: letters, digits and . _ - only", field=ROLLOUT_KEY)
    attempt = body.get(_ATTEMPT) or 0
    return f"{name}-a{attempt}" if attempt else name


def lake_place(name: str) -> tuple[str, int]:
    """(rollout id, attempt) of a rollout that NeMo-Gym names so.

    `{group}_g{i}` is one already, `{task}-{i}` is rollout i of the group `{task}`, `-a{k}` is its attempt k; any other
    name is a group of one. Raises `InvalidInput` for what no id can be.
    """
    match = _GROUPED.fullmatch(name) or _COUNTED.fullmatch(name)
    if match is None:
        return check_rollout_id(f"{check_group_id(name)}_g0"), 0
    found = match.groupdict()
    rollout = found.get("rollout") or f"{found['task']}_g{found['index']}"
    return check_rollout_id(rollout), int(found["attempt"] or 0)


def rollout_base_url(gate_url: str, body: Mapping[str, Any]) -> str | None:
    """The OpenAI base URL behind which a gate captures the rollout of a run body; None where the body names none."""
    name = gym_rollout_id(body)
    if name is None:
        return None
    return f"{gate_url.rstrip('/')}/ng-rollout/{lake_place(name)[0]}/training-token-capture/v1"
