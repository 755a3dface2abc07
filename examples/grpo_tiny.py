"""Asynchronous GRPO on the embedded model: agents, gate, claims, rows, loss and new weights, on two cores in minutes.

    .venv/bin/python examples/grpo_tiny.py --steps 22        # the same as `make train`

What it is made of, in the order of a step:

- agents that play groups through the gate all the time: `tokenlake/api/demo/solver.py`
- claims, rows, weights and the log of a step: `tokenlake/api/demo/train.py`
- the clipped loss, and the k3 between trainer and sampler: `tokenlake/api/demo/learner.py`
- the same rows, as people make them who have text only: `tokenlake/api/demo/retokenized.py`

`docs/training.md` says what comes out.
"""

from tokenlake.api.demo.train import main

if __name__ == "__main__":
    raise SystemExit(main())
