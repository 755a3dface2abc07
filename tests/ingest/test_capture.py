"""The capture core: what it accepts, what it refuses, and what it binds."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tokenlake.ingest.capture import CaptureCore, ParentLink
from tokenlake.ingest.coords import CAPTURE_FAILURES, Coords
from tokenlake.store.delta import Delta, Place
from tokenlake.store.digest import ArrayBytes, chain_hash

PROMPT = [11, 12, 13]
ANSWER = [21, 22]


class Kept:
    """A stager that keeps what it is given."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def stage(self, delta: Delta) -> Place:
        self.deltas.append(delta)
        return Place(writer="w", segment=0, byte_offset=8, byte_length=8)


def hashed(parent: bytes | None, ids: Sequence[int]) -> bytes:
    raw = array("i", ids).tobytes()
    return chain_hash(parent, ArrayBytes(len(ids), raw))


def capture(
    parent: ParentLink | None = None, prompt: Any = PROMPT, answer: Any = ANSWER, *, strict: bool = True, **more: Any
) -> tuple[Coords, Delta | None]:
    stager = Kept()
    core = CaptureCore(stager, strict=strict)
    given: dict[str, Any] = {
        "logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "weight_version": 1,
        "weight_version_end": 1,
        **more,
    }
    ticket = core.begin(rollout_id="g_g0", attempt=0, call_id="c1", parent=parent)
    coords = core.complete(ticket, prompt_token_ids=prompt, token_ids=answer, **given)
    return coords, stager.deltas[0] if stager.deltas else None


def link(token_ids: bytes | None = None) -> ParentLink:
    """A parent of `PROMPT` and `ANSWER`."""
    return ParentLink(
        call_id="c0",
        root_call_id="c0",
        depth=0,
        cum_len=5,
        chain_hash=hashed(None, [*PROMPT, *ANSWER]),
        token_ids=token_ids,
    )


EXACT = array("i", [*PROMPT, *ANSWER]).tobytes()


FORMS: list[Callable[[list[int]], Any]] = [
    lambda ids: array("i", ids),
    lambda ids: memoryview(array("i", ids)),
    lambda ids: np.array(ids, np.int32),
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array([x for i in ids for x in (i, 0)], np.int32)[::2],
    tuple,
    lambda ids: [f"token_id:{i}" for i in ids],
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_ids_gives_the_same_record(form: Any) -> None:
    wanted, delta = capture(link(EXACT), [*PROMPT, *ANSWER, 31], [41, 42])
    found, same = capture(link(EXACT), form([*PROMPT, *ANSWER, 31]), form([41, 42]))
    assert delta is not None
    assert same is not None
    assert bytes(delta.token_ids or b"") == array("i", [31, 41, 42]).tobytes()
    assert (found.digest, found.chain_hash, found.prompt_digest) == (
        wanted.digest,
        wanted.chain_hash,
        wanted.prompt_digest,
    )
    assert (found.prev_len, found.delta_len, found.cum_len, found.sampled_tokens) == (5, 3, 8, 2)


def test_the_prompt_digest_binds_the_parent_and_what_was_added() -> None:
    root, _ = capture()
    assert root.prompt_digest == hashed(None, PROMPT)
    child, _ = capture(link(), [*PROMPT, *ANSWER, 31], [41, 42])
    assert child.prompt_digest == hashed(link().chain_hash, [31])
    again, _ = capture(link(), [*PROMPT, *ANSWER, 31], [51, 52])
    assert again.prompt_digest == child.prompt_digest
    assert again.chain_hash != child.chain_hash
    other, _ = capture(link(), [*PROMPT, *ANSWER, 32], [41, 42])
    assert other.prompt_digest != child.prompt_digest


def test_an_empty_prompt_and_an_empty_answer_are_arrays_too() -> None:
    coords, delta = capture(None, array("i"), array("i"), logprobs=[])
    assert coords.disposition == "staged"
    assert coords.prompt_digest == hashed(None, [])
    assert delta is not None
    assert (delta.token_ids, delta.token_mask, delta.logprobs) == (b"", b"", b"")


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        ("prompt_ids_missing", {"prompt": None}),
        ("token_ids_missing", {"answer": None}),
        ("token_id_invalid", {"prompt": [11, -1]}),
        ("token_id_invalid", {"prompt": array("i", [11, -1])}),
        ("token_id_invalid", {"answer": [21, 2**31]}),
        ("token_id_invalid", {"answer": [21, 2.0]}),
        ("token_id_invalid", {"answer": array("f", [21, 22])}),
        ("token_id_invalid", {"answer": ["token_id:21", "token_id:"]}),
        ("token_id_invalid", {"answer": ["token_id:21", "token_id:" + 5000 * "9"]}),
        ("logprobs_missing", {"logprobs": None}),
        ("logprobs_missing", {"logprobs": [-0.5, None]}),
        ("logprobs_missing", {"logprobs": [-0.5, "x"]}),
        ("logprobs_misaligned", {"logprobs": [-0.5]}),
        ("logprob_not_finite", {"logprobs": [-0.5, float("nan")]}),
        ("logprob_not_finite", {"logprobs": [float("inf"), float("-inf")]}),
        ("logprob_not_finite", {"logprobs": [-0.5, -1e39]}),
        ("prefix_mismatch", {"parent": link(EXACT), "prompt": [*PROMPT, 21, 23, 31]}),
        ("prefix_mismatch", {"parent": link(EXACT), "prompt": array("i", [*PROMPT, 21, 23, 31])}),
        ("prefix_mismatch", {"parent": link(EXACT), "prompt": PROMPT}),
        ("prefix_mismatch", {"parent": link(None), "prompt": PROMPT}),
        ("prefix_mismatch", {"parent": link(EXACT[:-4]), "prompt": [*PROMPT, *ANSWER, 31]}),
        ("extras_invalid", {"extras": {"x": float("nan")}}),
        ("versions_invalid", {"weight_version_spans": [(1, 0, 1)]}),
    ],
)
def test_what_is_wrong_is_refused_by_name(reason: str, given: dict[str, Any]) -> None:
    coords, delta = capture(**given)
    assert (coords.disposition, coords.reason, delta) == ("capture_failed", reason, None)
    assert reason in CAPTURE_FAILURES


def test_a_false_record_from_elsewhere_is_kept_as_it_is() -> None:
    coords, delta = capture(link(EXACT), [*PROMPT, 21, 23, 31], ANSWER, strict=False, logprobs=[None, -1e39])
    assert delta is not None
    assert coords.chain_hash == hashed(hashed(None, [*PROMPT, 21, 23]), [31, *ANSWER])
    assert coords.prompt_digest == hashed(hashed(None, [*PROMPT, 21, 23]), [31])
    assert delta.logprob_nulls == (1,)
    assert memoryview(bytes(delta.logprobs or b"")).cast("f").tolist() == [0.0, 0.0, float("-inf")]
