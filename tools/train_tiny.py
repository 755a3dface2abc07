"""Makes the weights of the embedded tiny model: tokenizer, supervised warm start, and a measurement.

    python tools/train_tiny.py tokenizer            # tokenizer.json and config.json
    python tools/train_tiny.py train                # model.safetensors
    python tools/train_tiny.py solve --tasks 100    # solve rate of the agent loop at temperature 1.0

The shipped files come from these commands with their defaults: 5000 steps, 140 million tokens, two minutes on one
H200 (a processor of two cores sees 10 thousand tokens a second). Every run is a function of its seed, the number of
workers and the versions of torch, tokenizers and reasoning_gym, up to the rounding of parallel sums. The loss covers
the tokens of the assistant's turns alone. A part of the conversations has a digit or an operator of the first
expression wrong (`TYPO_RATE`): a policy that is always right would give groups without a spread of rewards, and
nothing to learn; a typo is what reinforcement can unlearn.
"""

# torch, safetensors and reasoning_gym are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenlake.ingest.engine import SamplingParams
from tokenlake.ingest.tiny import tasks
from tokenlake.ingest.tiny.engine import TinyEngine
from tokenlake.ingest.tiny.model import TinyConfig, TinyModel
from tokenlake.ingest.tiny.template import ChatTemplate
from tokenlake.ingest.tiny.tokenizer import TinyTokenizer, train_tokenizer

WEIGHTS = Path(__file__).parent.parent / "tokenlake" / "ingest" / "tiny" / "weights"
VOCAB_SIZE = 1024
TYPO_RATE = 0.55
THINK_RATE = 0.2
THOUGHTS = ("I use the calculator.", "One call is enough.", "Copy the expression.", "I check the result.")
SAYINGS = ("Let me calculate.", "I use the calculator.", "Let me check.")
Messages = list[dict[str, Any]]


class Questions:
    """Endless (question, expression, answer) in the style of two reasoning_gym data sets."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sets = [
            (weight, reasoning_gym.create_dataset(name, size=10**9, seed=rng.randrange(10**6), **limits))
            for weight, name, limits in (
                (8, "chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
                (2, "chain_sum", {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 4}),
                (5, "basic_arithmetic", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
                (1, "basic_arithmetic", {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 3}),
                (1, "basic_arithmetic", {"max_terms": 3, "max_digits": 2, "format_style": "natural"}),
            )
        ]

    def __call__(self) -> tuple[str, str, str]:
        """Draw the next one."""
        (_, dataset), *_ = self._rng.choices(self._sets, weights=[weight for weight, _ in self._sets])
        entry = dataset[self._rng.randrange(10**8)]
        return entry["question"], entry["metadata"]["expression"], entry["answer"]


class Conversations:
    """Endless (messages, tools) of every shape the model is trained for."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._questions = Questions(self._rng)

    def __call__(self) -> tuple[Messages, list[dict[str, Any]] | None]:
        """Draw the next one."""
        rng = self._rng
        question, expression, _ = self._questions()
        if rng.random() < 0.06:
            user = {"role": "user", "content": f"{question}\n{tasks.SIDE_TASK}"}
            return [_system(tasks.SIDE_SYSTEM_PROMPT), user, _assistant(tasks.operation_word(expression))], None
        usual = rng.random() < 0.55
        messages: Messages = [_system(tasks.SYSTEM_PROMPT if usual else self._system_prompt())]
        start = rng.random()
        if start < 0.06:
            result = tasks.calculator(expression)
            messages.append(_user(tasks.SUMMARY_DONE.format(question=question, result=result)))
            messages.append(self._answer(result))
        else:
            opening = tasks.SUMMARY_OPEN.format(question=question) if start < 0.12 else question
            messages.append(_user(opening))
            result = self._solve(messages, expression)
        while rng.random() < 0.35:
            result, expression = self._follow(messages, expression, result)
        return messages, [self._tool()]

    def _system_prompt(self) -> str:
        """One of the known ones, sometimes with the date that harnesses add."""
        prompt = self._rng.choice(tasks.SYSTEM_PROMPTS)
        if self._rng.random() < 0.3:
            year, month, day = self._rng.randint(2024, 2029), self._rng.randint(1, 12), self._rng.randint(1, 28)
            prompt += f" Today is {year}-{month:02}-{day:02}."
        return prompt

    def _tool(self) -> dict[str, Any]:
        """The calculator, sometimes as other dialects and clients write its schema."""
        function = dict(tasks.CALCULATOR_TOOL["function"])
        if self._rng.random() < 0.8:
            return tasks.CALCULATOR_TOOL
        if self._rng.random() < 0.5:
            function["parameters"] = {**function["parameters"], "additionalProperties": False}
        if self._rng.random() < 0.5:
            function["strict"] = self._rng.random() < 0.7
        if self._rng.random() < 0.5:
            function = {key: function[key] for key in sorted(function)}
        return {"type": "function", "function": function}

    def _follow(self, messages: Messages, expression: str, result: str) -> tuple[str, str]:
        choice = self._rng.choice(("check", "check", "again", "side", "side", "next"))
        if choice == "check":
            messages.append(_user(self._rng.choice(tasks.FOLLOW_UPS[:2])))
            if self._rng.random() < 0.8:
                return self._solve(messages, expression), expression
            messages.append(self._answer(result))
        elif choice == "again":
            messages.append(_user(tasks.FOLLOW_UPS[2]))
            messages.append(self._answer(result))
        elif choice == "side":
            messages.append(_user(tasks.SIDE_TASK))
            messages.append(_assistant(tasks.operation_word(expression)))
        else:
            question, expression, _ = self._questions()
            messages.append(_user(question))
            return self._solve(messages, expression), expression
        return result, expression

    def _solve(self, messages: Messages, expression: str) -> str:
        rng = self._rng
        style = rng.random()
        parts = expression.split()
        if style < 0.2 and len(parts) == 5 and set(parts[1::2]) <= {"+", "-"} and "(" not in expression:
            first = self._call(messages, self._typo(" ".join(parts[:3])))
            result = self._call(messages, " ".join([first, *parts[3:]]))
        else:
            result = self._call(messages, self._typo(expression))
            if 0.2 <= style < 0.4 or result.startswith("error"):
                result = self._call(messages, expression)
        messages.append(self._answer(result))
        return result

    def _call(self, messages: Messages, expression: str) -> str:
        rng = self._rng
        number = sum(message["role"] == "tool" for message in messages)
        arguments = json.dumps({"expression": expression})
        call = {"id": f"call_{number}", "type": "function"}
        call["function"] = {"name": "calculator", "arguments": arguments}  # type: ignore[assignment]
        turn = _assistant(rng.choice(SAYINGS) if rng.random() < 0.15 else "")
        if rng.random() < THINK_RATE:
            turn["reasoning_content"] = rng.choice(THOUGHTS)
        result = tasks.calculator(expression)
        messages.append(turn | {"tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
        return result

    def _typo(self, expression: str) -> str:
        """The expression, or one with a digit or an operator wrong, or a bracket lost."""
        rng = self._rng
        if rng.random() >= TYPO_RATE:
            return expression
        if rng.random() < 0.1:
            return expression + " )"
        places = [i for i, c in enumerate(expression) if c.isdigit()]
        if rng.random() < 0.2:
            places = [i for i in range(1, len(expression)) if expression[i - 1 : i + 2] in (" + ", " - ", " * ")]
        if not places:
            return expression
        place = rng.choice(places)
        wrong = rng.choice("123456789" if expression[place].isdigit() else "+-*")
        return expression[:place] + wrong + expression[place + 1 :]

    def _answer(self, result: str) -> dict[str, Any]:
        turn = _assistant(f"Answer: {result}" if self._rng.random() < 0.7 else result)
        if self._rng.random() < THINK_RATE / 4:
            turn["reasoning_content"] = self._rng.choice(THOUGHTS)
        return turn


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def make_tokenizer(seed: int) -> None:
    """Learn the vocabulary from conversations and from the English of reasoning_gym's questions."""
    conversations, template = Conversations(seed), ChatTemplate()

    def texts() -> Iterator[str]:
        for _ in range(3000):
            messages, tools = conversations()
            yield template.render(messages, tools, add_generation_prompt=False)
        for name in sorted(reasoning_gym.factory.DATASETS):
            try:
                dataset = reasoning_gym.create_dataset(name, size=12, seed=seed)
            except (OSError, ValueError, TypeError, AssertionError):
                continue
            yield from (entry["question"] for entry in dataset)

    WEIGHTS.mkdir(exist_ok=True)
    train_tokenizer(texts(), VOCAB_SIZE, WEIGHTS / "tokenizer.json")
    tokenizer = TinyTokenizer(WEIGHTS / "tokenizer.json")
    config = TinyConfig(vocab_size=tokenizer.vocab_size)
    (WEIGHTS / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless (ids [B, T], which of them an assistant sampled [B, T]): conversations of like length, padded at the end.

    Each worker process of a loader draws from a seed of its own.
    """

    def __init__(self, seed: int, size: int) -> None:
        super().__init__()
        self._seed, self._size = seed, size
        self._tokenizer = TinyTokenizer(WEIGHTS / "tokenizer.json")
        self._template = ChatTemplate()
        self._header = self._tokenizer.encode("<|im_start|>assistant\n")

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Draw batches without end."""
        worker = get_worker_info()
        seed = self._seed * 1000 + (worker.id if worker is not None else 0)
        conversations, rng = Conversations(seed), random.Random(seed)
        while True:
            pool = sorted((self._ids(conversations, rng) for _ in range(self._size * 16)), key=len)
            batches = [pool[i : i + self._size] for i in range(0, len(pool), self._size)]
            rng.shuffle(batches)
            yield from map(self._padded, batches)

    def _ids(self, conversations: Conversations, rng: random.Random) -> list[int]:
        messages, tools = conversations()
        keep = rng.random() < 0.7
        text = self._template.render(messages, tools, add_generation_prompt=False, keep_thinking=keep)
        return self._tokenizer.encode(text)[:1024]

    def _padded(self, batch: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, batch))
        ids = torch.full((len(batch), longest), self._tokenizer.pad_id)
        trained = torch.zeros((len(batch), longest), dtype=torch.bool)
        for row, sequence in enumerate(batch):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            trained[row, : len(sequence)] = torch.tensor(self._trained(sequence))
        return ids, trained

    def _trained(self, ids: list[int]) -> list[bool]:
        """Which ids an assistant turn sampled, its end-of-turn included."""
        header, end, inside = self._header, self._tokenizer.stop_ids[0], False
        trained = [False] * len(ids)
        for i, token in enumerate(ids):
            trained[i] = inside
            if inside and token == end:
                inside = False
            elif ids[max(0, i - len(header) + 1) : i + 1] == header:
                inside = True
        return trained


def train(*, steps: int, batch: int, peak: float, seed: int, workers: int, device: str, out: Path) -> None:
    """Train, and write float16 weights at every 500 steps and at the end."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = TinyModel(TinyConfig.read(WEIGHTS / "config.json")).to(device)
    loader = DataLoader(
        Batches(seed, batch), batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None
    )
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.97), fused=True)
    began, seen = time.monotonic(), 0
    for step, (ids, trained) in enumerate(itertools.islice(loader, steps), start=1):
        rate = peak * min(1.0, step / 200) * (0.02 + 0.98 * min(1.0, (1 - step / steps) / 0.5))
        for group in optimizer.param_groups:
            group["lr"] = rate
        targets, chosen = ids[:, 1:][trained[:, 1:]].to(device), trained[:, 1:].flatten().nonzero()[:, 0].to(device)
        hidden = model.hidden(ids[:, :-1].to(device)).flatten(0, 1)[chosen]
        loss = F.cross_entropy(model.logits(hidden), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += ids.numel()
        if step % 100 == 0:
            spent = time.monotonic() - began
            print(f"step {step} loss {loss.item():.4f} rate {rate:.2e} tokens {seen} seconds {spent:.0f}", flush=True)
        if step % 500 == 0 or step == steps:
            save_file({name: p.detach().half().cpu() for name, p in model.named_parameters()}, out)
            out.chmod(0o644)


async def solve(*, count: int, rollouts: int, temperature: float, seed: int) -> None:
    """Print the share of solved tasks, of groups with mixed rewards, and of well-formed tool calls."""
    engine = TinyEngine(seed=seed)
    await engine.start()
    questions = Questions(random.Random(seed))
    counts = {"calls": 0, "bad": 0, "tokens": 0}
    began = time.monotonic()

    async def rollout(question: str, answer: str, name: str) -> bool:
        messages: Messages = [_system(tasks.SYSTEM_PROMPT), _user(question)]
        for turn in range(5):
            ids = engine.render(messages, [tasks.CALCULATOR_TOOL], add_generation_prompt=True)
            params = SamplingParams(temperature=temperature, max_tokens=120)
            generation = await engine.generate(ids, params, request_id=f"{name}-{turn}")
            said = engine.parse(generation.token_ids, generation.text)
            counts["calls"] += 1
            counts["tokens"] += len(generation.token_ids)
            if not said.tool_calls:
                counts["bad"] += turn == 0 or "<tool_call>" in generation.text
                return tasks.final_answer(said.content or "") == answer
            calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in said.tool_calls]
            messages.append({"role": "assistant", "content": said.content, "tool_calls": calls})
            for call in said.tool_calls:
                expression = json.loads(call.arguments).get("expression")
                result = tasks.calculator(expression) if isinstance(expression, str) else "error: no expression"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return False

    chosen = [questions() for _ in range(count)]
    solved = await asyncio.gather(
        *(rollout(q, a, f"{t}-{r}") for t, (q, _, a) in enumerate(chosen) for r in range(rollouts))
    )
    spent = time.monotonic() - began
    await engine.stop()
    groups = [solved[i : i + rollouts] for i in range(0, len(solved), rollouts)]
    mixed = sum(0 < sum(group) < rollouts for group in groups)
    print(f"solved {sum(solved) / len(solved):.3f} mixed groups {mixed / len(groups):.3f} of {len(groups)}")
    print(f"calls {counts['calls']} malformed {counts['bad']} tokens {counts['tokens']} seconds {spent:.1f}")


def main() -> None:
    """Read the command line and do the one job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    commands.add_parser("tokenizer")
    training = commands.add_parser("train")
    training.add_argument("--steps", type=int, default=5000)
    training.add_argument("--batch", type=int, default=128)
    training.add_argument("--peak", type=float, default=3e-3, help="learning rate")
    training.add_argument("--workers", type=int, default=14, help="processes that draw conversations")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    training.add_argument("--out", type=Path, default=WEIGHTS / "model.safetensors")
    solving = commands.add_parser("solve")
    solving.add_argument("--tasks", type=int, default=100)
    solving.add_argument("--rollouts", type=int, default=4)
    solving.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.command == "tokenizer":
        make_tokenizer(options.seed)
    elif options.command == "train":
        train(
            steps=options.steps,
            batch=options.batch,
            peak=options.peak,
            seed=options.seed,
            workers=options.workers,
            device=options.device,
            out=options.out,
        )
    else:
        asyncio.run(
            solve(count=options.tasks, rollouts=options.rollouts, temperature=options.temperature, seed=options.seed)
        )


if __name__ == "__main__":
    main()
