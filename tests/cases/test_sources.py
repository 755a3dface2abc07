"""What other systems wrote, imported: NeMo-Gym's token captures and plain traces; and rows out to Parquet readers."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import CaseLake, fail, group, seal


def digest(ids: list[int]) -> str:
    return hashlib.sha256(b"nemo-gym-tokens" + struct.pack(f">BQ{len(ids)}Q", 1, len(ids), *ids)).hexdigest()


def entry(rollout_id: str, call_id: str, prompt: list[int], generated: list[int], **more: Any) -> dict[str, Any]:
    record = {
        "schema_version": 1,
        "rollout_id": rollout_id,
        "model_call_id": call_id,
        "model": "m",
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": [-0.25] * len(generated),
        "routed_experts": None,
        "output_items": [],
        "response_id": f"resp-{call_id}",
        "created_at": 1.0,
        "parent_call_id": None,
        "parent_resolution": "root",
        "prompt_is_delta": False,
    }
    return record | {"digest": digest([*prompt, *generated])} | more


def write(folder: Path, name: str, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def take(case: CaseLake, source: str, path: Path) -> tuple[int, str, str]:
    return case.run("import", "--lake", str(case.path), "--from", source, str(path))


def test_token_captures_of_nemo_gym_become_exact_rows(case: CaseLake, tmp_path: Path) -> None:
    captures = tmp_path / "captures"
    second = {"parent_call_id": "a", "parent_resolution": "resolved", "prompt_is_delta": True, "digest": "unchecked"}
    write(captures, "t_g0.tokens.jsonl", entry("t_g0", "a", [1, 2, 3], [4, 5]), entry("t_g0", "b", [6], [7], **second))
    write(captures, "t_g2.tokens.jsonl", entry("t_g2", "a", [1, 2, 3], [8], routed_experts=[[0, 1]]))
    status, out, err = take(case, "nemo-gym", captures)
    assert status == 0, err
    assert "1 groups, 3 calls" in out
    case.take(seal("t_g0", 1.0, terminal_response_id="resp-b"), seal("t_g2", 0.0))
    case.finalize("--policy", "group_deadline_s=0")
    first, absent, third = case.rows()
    assert (first["input_ids"], first["token_mask"]) == ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 0, 1])
    assert (absent["reason"], third["input_ids"]) == ("never_sealed", [1, 2, 3, 8])
    assert case.audit() == (0, [])
    assert "0 calls, 0 seals, 0 fails; 4 records were there already" in take(case, "nemo-gym", captures)[1]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"digest": "0" * 64}, "digest_mismatch"),
        ({"parent_resolution": "unresolved"}, "unresolved_parent"),
        ({"incomplete": True}, "incomplete"),
    ],
)
def test_what_nemo_gym_itself_does_not_stand_behind_is_a_placeholder(
    case: CaseLake, tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    captures = tmp_path / "captures"
    file = write(captures, "t_g0.tokens.jsonl", entry("t_g0", "a", [1, 2], [3], **more))
    if "incomplete" in more:
        (captures / "t_g0.tokens.incomplete").write_text("lost\n")
    assert take(case, "nemo-gym", file)[0] == 0
    case.finalize()
    assert [row["reason"] for row in case.rows()] == [reason]


@pytest.mark.parametrize(
    ("name", "place"),
    [("7-0", ("7_g0", 0, 1)), ("t_g1-a2", ("t_g1", 2, 2)), ("one", ("one_g0", 0, 1))],
)
def test_an_id_of_another_form_has_its_place(
    case: CaseLake, tmp_path: Path, name: str, place: tuple[str, int, int]
) -> None:
    file = write(tmp_path, f"{name}.tokens.jsonl", entry(name, "a", [1], [2]))
    assert take(case, "nemo-gym", file)[0] == 0
    assert case.sql("SELECT rollout_id, attempt, n FROM rollouts WHERE calls > 0") == [place]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (json.dumps(entry("t_g0", "a", [1], [2]) | {"schema_version": 2}), "line 1: a token entry of schema 2"),
        ("{", "line 1: not valid JSON"),
        (json.dumps(entry("t_g0", "a", [1], [2]) | {"prompt_token_ids": [-1]}), "line 1: prompt_token_ids"),
        (json.dumps({"model_call_id": "a"}), "line 1: rollout_id must be a text"),
    ],
)
def test_a_malformed_capture_is_refused_by_line(case: CaseLake, tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "x.tokens.jsonl"
    file.write_text(line + "\n")
    status, _, err = take(case, "nemo-gym", file)
    assert status == 2
    assert why in err
    assert case.sql("SELECT count(*) FROM lineage") == [(0,)]


def test_traces_become_rollouts_with_their_turns_and_the_last_reward(case: CaseLake, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "traces.jsonl",
        {"uid": "q1", "prompt_ids": [1, 2], "response_ids": [3], "rollout_log_probs": [-0.5], "reward": 1.0},
        {"uid": "q1", "prompt_ids": [1, 2], "response_ids": [4], "rollout_log_probs": [-0.5], "reward": 0.0},
        {"rollout_id": "q2_g0", "prompt_token_ids": [1], "response_token_ids": [2], "logprobs": [-0.5]},
        {
            "rollout_id": "q2_g0",
            "prompt_token_ids": [1, 2, 9],
            "response_token_ids": [3],
            "logprobs": [-0.5],
            "score": 2,
        },
    )
    assert take(case, "traces", file)[0] == 0
    case.finalize()
    found = {row["sample_id"]: (row["input_ids"], row["token_mask"], row["reward"]) for row in case.rows()}
    assert found == {
        "q1_g0": ([1, 2, 3], [0, 0, 1], 1.0),
        "q1_g1": ([1, 2, 4], [0, 0, 1], 0.0),
        "q2_g0": ([1, 2, 9, 3], [0, 1, 0, 1], 2.0),
    }


def test_traces_that_name_group_and_rollout_stay_in_their_group(case: CaseLake, tmp_path: Path) -> None:
    sample = {"prompt_ids": [1, 2], "logprobs": [-0.5], "reward": 1.0}
    file = write(
        tmp_path,
        "traces.jsonl",
        sample | {"uid": "q1", "rollout_id": "first", "response_ids": [3]},
        sample | {"uid": "q1", "rollout_id": "b_g0", "response_ids": [4]},
        sample | {"uid": "q1", "rollout_id": "first", "prompt_ids": [1, 2, 3, 9], "response_ids": [5]},
        sample | {"uid": "q2", "rollout_id": "q2_g1", "response_ids": [6]},
        sample | {"uid": "q2", "rollout_id": "q2_g0", "response_ids": [7]},
    )
    assert take(case, "traces", file)[0] == 0
    case.finalize()
    assert {row["sample_id"]: row["input_ids"] for row in case.rows()} == {
        "q1_g0": [1, 2, 3, 9, 5],
        "q1_g1": [1, 2, 4],
        "q2_g0": [1, 2, 7],
        "q2_g1": [1, 2, 6],
    }
    assert "11 records were there already" in take(case, "traces", file)[1]


def test_a_group_that_cannot_be_is_refused_by_the_line_that_names_it(case: CaseLake, tmp_path: Path) -> None:
    sample = {"prompt_ids": [1], "response_ids": [2], "logprobs": [-0.5]}
    file = write(tmp_path, "traces.jsonl", sample | {"uid": "q"}, sample | {"uid": "a/b"})
    status, _, err = take(case, "traces", file)
    assert (status, "line 2: group_id is not a valid id" in err) == (2, True)


def test_hugging_face_datasets_reads_exported_rows(case: CaseLake, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lines = [{"uid": f"q{i}", "prompt_ids": [i], "response_ids": [2], "logprobs": [-0.5], "reward": i} for i in (1, 2)]
    take(case, "traces", write(tmp_path, "t.jsonl", *lines))
    case.finalize()
    out = tmp_path / "rows"
    assert case.run("rows", "--lake", str(case.path), "--format", "hf", "--out", str(out)) == (0, "", "")
    loaded = datasets.load_from_disk(str(out))
    assert [(row["sample_id"], row["input_ids"], row["reward"]) for row in loaded] == [
        ("q1_g0", [1, 2], 1.0),
        ("q2_g0", [2, 2], 2.0),
    ]
    (exact,) = case.sql("SELECT row_digest, published_at FROM ready_rows WHERE group_id = 'q1'")
    assert (loaded[0]["row_digest"], loaded[0]["published_at"]) == exact
    one = tmp_path / "one"
    assert case.run("rows", "--lake", str(case.path), "--format", "hf", "--group", "q2", "--out", str(one))[0] == 0
    assert datasets.load_from_disk(str(one))["sample_id"] == ["q2_g0"]
    status, _, err = case.run("rows", "--lake", str(case.path), "--format", "hf", "--out", str(out))
    assert (status, "exists" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [], "nothing is left beside it"


def test_an_export_without_the_library_or_a_folder_says_what_is_missing(
    case: CaseLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.take(group("g"), fail("g_g0"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    status, _, err = case.run("rows", "--lake", str(case.path), "--format", "hf")
    assert (status, "--out DIR" in err) == (2, True)
    status, _, err = case.run("rows", "--lake", str(case.path), "--format", "hf", "--out", str(tmp_path / "rows"))
    assert (status, "pip install 'tokenlake[hf]'" in err) == (2, True)
