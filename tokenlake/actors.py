"""Actors of a Ray: how one is joined, what is made of them, and how their answers and errors come back.

Source of the guarantees: Ray's actor fault tolerance (`max_restarts`, `max_task_retries`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenlake.errors import ConfigError, Deadline, EngineFailed, MissingExtra, TokenlakeError

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError, RayTaskError
except ImportError as error:
    raise MissingExtra("actors on other machines need Ray: pip install 'tokenlake[ray]'") from error

__all__ = ["actor_of", "answer", "end", "join", "node_address"]


def join() -> None:
    """Join the Ray of `RAY_ADDRESS` or of this machine, unless one is joined; `ConfigError` where there is none."""
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(f"there is no Ray to run on ({error}): `ray start --head`, or set RAY_ADDRESS") from error


def actor_of(kind: type, options: Mapping[str, Any] | None, **restarts: int) -> Any:
    """What makes actors of a class: a CPU each, spread over the nodes, started again when they die.

    `options`: Ray's own (`num_cpus`, `num_gpus`, `resources`, `runtime_env`, ...), which come before these.
    """
    how = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **(options or {})}
    return ray.remote(max_restarts=-1, **restarts, **how)(kind)


def answer(waiting: Any, who: str, deadline_s: float) -> Any:
    """What an actor answers.

    Raises what it raised of Tokenlake's own errors, `Deadline` where it does not answer in time, and `EngineFailed`
    where it died and could not go on.
    """
    try:
        return ray.get(waiting, timeout=deadline_s)
    except RayTaskError as error:
        cause: Any = error.cause
        if isinstance(cause, TokenlakeError):
            raise cause from None
        raise
    except GetTimeoutError as error:
        raise Deadline(f"{who} did not answer within {deadline_s:g} s") from error
    except (RayActorError, RaySystemError) as error:
        raise EngineFailed(f"{who} died and could not go on: {error}") from error


def end(actors: Iterable[Any]) -> None:
    """End actors at once."""
    for actor in actors:
        ray.kill(actor)


def node_address() -> str:
    """The address of the node that this runs on."""
    return ray.util.get_node_ip_address()
