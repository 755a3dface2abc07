"""NeMo-Gym's token capture over a lake: what it stages, where it reads it back, and how that becomes rows.

`staging` is for a worker that stages its own calls, `tokens` for a model server that puts whole token entries,
`receive` for the owner of the lake, `carrier` for an agent. All but `carrier` and `digests` need the package
`nemo-gym`; without it their import fails with `tokenlake.errors.MissingExtra`.
"""

from tokenlake.ingest.nemo_gym.carrier import ROLLOUT_KEY, gym_rollout_id, lake_place, rollout_base_url

__all__ = ["ROLLOUT_KEY", "gym_rollout_id", "lake_place", "rollout_base_url"]
