-- what: the verified calls of each chain folded into one sequence; where there is no terminal, the first root alone, for
--   its prompt. Arrays are ordered by position after the fold, which is cheaper than ordering tokens inside it; a second
--   copy of a record counts once
-- grain: rollout
-- reads: chains, terminals, verified_calls
CREATE OR REPLACE VIEW chain_arrays AS
WITH wanted AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        position,
        call_id
    FROM chains
    UNION ALL BY NAME
    SELECT
        group_id,
        rollout_id,
        attempt,
        0 AS position,
        first_root AS call_id
    FROM terminals
    WHERE terminal_call_id IS NULL AND first_root IS NOT NULL
),

folded AS (
    SELECT
        wanted.group_id,
        wanted.rollout_id,
        wanted.attempt,
        list(wanted.position) AS positions,
        list(calls.call_id) AS call_ids,
        list(calls.sampled_tokens) AS sampled_tokens,
        list(calls.token_ids) AS token_ids,
        list(calls.token_mask) AS token_mask,
        list(calls.logprobs) AS logprobs,
        max(wanted.position) + 1 AS turns,
        CASE count(*) WHEN count(calls.weight_version) THEN min(calls.weight_version) END AS weight_version_min,
        CASE count(*) WHEN count(calls.weight_version_end) THEN max(calls.weight_version_end) END
            AS weight_version_max,
        CASE WHEN count(*) = count(calls.temperature) AND min(calls.temperature) = max(calls.temperature)
            THEN min(calls.temperature)
        END AS temperature,
        CASE WHEN count(*) = count(calls.logprob_mode) AND min(calls.logprob_mode) = max(calls.logprob_mode)
            THEN min(calls.logprob_mode)
        END AS logprob_mode,
        arg_min({'reason': calls.reason, 'call_id': calls.call_id, 'detail': calls.detail}, wanted.position)
            FILTER (calls.reason IS NOT NULL) AS fault,
        any_value(calls.mask_len - coalesce(calls.mask_sum, 0)) FILTER (
            wanted.position = 0
            AND calls.parent_call_id IS NULL
            AND calls.staged
            AND calls.ok_digest
            AND calls.ok_token_ids_present
            AND calls.ok_token_ids_positive
            AND calls.ok_token_ids_in_vocabulary
            AND calls.ok_mask
        ) AS prompt_len
    FROM wanted
    INNER JOIN verified_calls AS calls
        ON
            wanted.group_id = calls.group_id
            AND wanted.rollout_id = calls.rollout_id
            AND wanted.attempt = calls.attempt
            AND wanted.call_id = calls.call_id
    GROUP BY wanted.group_id, wanted.rollout_id, wanted.attempt
),

ordered AS (
    SELECT
        *,
        CASE len(positions)
            WHEN turns THEN list_grade_up(positions)
            ELSE list_transform(range(turns), lambda place: list_position(positions, place::INTEGER))
        END AS places
    FROM folded
)

SELECT
    group_id,
    rollout_id,
    attempt,
    turns,
    weight_version_min,
    weight_version_max,
    temperature,
    logprob_mode,
    fault,
    prompt_len,
    list_select(call_ids, places) AS call_ids,
    list_sum(list_select(sampled_tokens, places))::BIGINT AS sampled_tokens,
    flatten(list_select(token_ids, places)) AS input_ids,
    flatten(list_select(token_mask, places)) AS token_mask,
    flatten(list_select(logprobs, places)) AS logprobs
FROM ordered;
