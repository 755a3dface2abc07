"""`make train`: GRPO on the embedded model, end to end on this machine, from claims to new weights.

Agents ask the model short questions and are rewarded for short answers, a thing so small that a few steps teach it.
Each step plays groups, claims them, loads their rows, weighs them against their groups, makes one gradient step, and
hands the new weights to the engine. What it shows: the ratio between the log-probabilities of the model and those that
were captured is 1 before a step, because rows hold the very tokens that were sampled; and the reward rises.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from openai import AsyncOpenAI

from tokenlake.api.client import AsyncClient
from tokenlake.api.demo.tasks import Task, make_tasks
from tokenlake.api.results import Slot
from tokenlake.api.serve import Running, embedded
from tokenlake.api.service import Service
from tokenlake.finalize.advantages import group_advantages, trained_tokens
from tokenlake.finalize.loader import RowLoader
from tokenlake.finalize.tensors import Batch, next_token
from tokenlake.ingest.tiny import TinyEngine
from tokenlake.ingest.tiny.model import TinyModel
from tokenlake.store.lake import OwnedLake

__all__ = ["Step", "main", "train"]

_MAX_TOKENS = 48
_LEARNING_RATE = 3e-4
_CLIP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step saw before it changed the weights."""

    reward: float
    """Mean over the rollouts of the step."""
    ratio_off: float
    """The largest distance from 1 of exp(recomputed - captured log-probability) over all sampled tokens."""
    tokens: int
    """Sampled tokens that were trained."""


def train(path: Path, *, steps: int, groups: int, rollouts: int, seed: int) -> list[Step]:
    """Play and train `steps` times over a new lake at `path`."""
    engine = TinyEngine(seed=seed)
    with OwnedLake.open(path) as lake, embedded(Service(lake, engine, policy={"max_staleness": 0})) as running:
        return asyncio.run(_loop(running, engine, path, make_tasks(steps * groups, seed), steps, groups, rollouts))


async def _loop(
    running: Running, engine: TinyEngine, path: Path, tasks: Sequence[Task], steps: int, groups: int, rollouts: int
) -> list[Step]:
    model = TinyModel.from_state(engine.model.config, engine.model.state_dict()).requires_grad_(requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    first = engine.weight_version or 0
    done: list[Step] = []
    async with AsyncClient(running.url, running.token) as client:
        for number in range(steps):
            version = first + number
            await client.set_weight_version(version)
            played = [
                _play(client, f"step{number:03d}-{group}", rollouts, tasks[number * groups + group])
                for group in range(groups)
            ]
            await asyncio.gather(*played)
            claim = await client.claim("trainer", groups=groups, current_version=version)
            names = [group["group_id"] for group in claim["groups"]]
            (batch,) = RowLoader(path, groups=names, groups_per_batch=groups)
            done.append(_update(model, optimizer, batch))
            await engine.set_weights({name: each.detach() for name, each in model.state_dict().items()}, version + 1)
            await client.consume(claim["claim_id"], checkpoint=f"step-{number}")
    return done


async def _play(client: AsyncClient, group_id: str, rollouts: int, task: Task) -> None:
    """All rollouts of a group, at once, and its publication."""
    registered = await client.register_group(group_id, rollouts)
    await asyncio.gather(*(_rollout(client, each, task) for each in registered["rollouts"]))
    await client.publish(group_id)


async def _rollout(client: AsyncClient, registered: Slot, task: Task) -> None:
    """One question, one answer; the shorter, the better."""
    async with AsyncOpenAI(base_url=registered["base_url"], api_key=registered["data_capability"]) as sdk:
        answer = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": task.question}], max_tokens=_MAX_TOKENS
        )
    used = answer.usage.completion_tokens if answer.usage is not None else _MAX_TOKENS
    await client.seal(registered["rollout_id"], reward=1 - used / _MAX_TOKENS, terminal_response_id=answer.id)


def _update(model: TinyModel, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
    """One gradient step of clipped GRPO, averaged over the trained tokens."""
    step = next_token(batch)
    worth = group_advantages(batch["rewards"], batch["sample_mask"], batch["group_index"])
    mask = step.mask * batch["sample_mask"][:, None]
    logprobs = torch.log_softmax(model(step.inputs).float(), dim=-1).gather(-1, step.targets[..., None])[..., 0]
    ratio = torch.exp((logprobs - step.logprobs) * mask)
    gain = torch.minimum(ratio * worth[:, None], ratio.clamp(1 - _CLIP, 1 + _CLIP) * worth[:, None])
    tokens = int(trained_tokens(batch["token_mask"], batch["sample_mask"]))
    loss: torch.Tensor = -(gain * mask).sum() / max(tokens, 1)
    optimizer.zero_grad()
    loss.backward()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    optimizer.step()
    valid = batch["sample_mask"] == 1
    return Step(
        reward=float(batch["rewards"][valid].mean()),
        ratio_off=float((ratio.detach() - 1).abs().max()),
        tokens=tokens,
    )


def main() -> int:
    """0 when the ratio was 1 at step 0 and the reward rose, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="make train", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenlake-train-") as folder:
        steps = train(
            Path(folder) / "lake",
            steps=arguments.steps,
            groups=arguments.groups,
            rollouts=arguments.rollouts,
            seed=arguments.seed,
        )
    for number, step in enumerate(steps):
        off = f"ratio within {step.ratio_off:.1e} of 1"
        sys.stdout.write(f"step {number:3d}  reward {step.reward:.3f}  {off}  {step.tokens} tokens\n")
    rose = steps[-1].reward > steps[0].reward
    exact = steps[0].ratio_off < 1e-3
    sys.stdout.write(
        f"reward {'rose' if rose else 'did not rise'}; ratio at step 0 {'is 1' if exact else 'is not 1'}\n"
    )
    return 0 if rose and exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
