-- what: every place of every group with its verdict and, when it has a terminal, its sequence: what `rollouts`,
--   `linear_rows` and `publishable_rows` are cut from, so that tokens are read once. Arrays are put in order after
--   the fold, which is cheaper than ordering tokens inside it; a second copy of a record counts once. Without a
--   terminal the first root is read for its prompt and the first orphan for its reason
-- grain: rollout
-- reads: rollout_trees, verified_calls, placeholder_reason
CREATE OR REPLACE VIEW judged_rollouts WITH (DEFER_BINDING) AS
WITH placed AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        head,
        calls,
        attempt_sampled_tokens,
        terminal_call_id,
        terminal_selection,
        terminal_reason,
        truncated,
        unnest(
            CASE WHEN path IS NULL THEN root_and_orphan ELSE list_select(call_ids, path) END
        ) AS call_id,
        generate_subscripts(
            CASE WHEN path IS NULL THEN root_and_orphan ELSE list_select(call_ids, path) END, 1
        )::INTEGER - 1 AS position
    FROM rollout_trees
),

folded AS (
    SELECT
        placed.group_id,
        placed.rollout_id,
        placed.attempt,
        any_value(placed.head) AS head,
        any_value(placed.calls) AS calls,
        any_value(placed.attempt_sampled_tokens) AS attempt_sampled_tokens,
        any_value(placed.terminal_call_id) AS terminal_call_id,
        any_value(placed.terminal_selection) AS terminal_selection,
        any_value(placed.terminal_reason) AS terminal_reason,
        any_value(placed.truncated) AS truncated,
        list(placed.position) AS positions,
        list(placed.call_id) AS call_ids,
        list(calls.sampled_tokens) AS sampled_tokens,
        list(calls.token_ids) AS token_ids,
        list(calls.token_mask) AS token_mask,
        list(calls.logprobs) AS logprobs,
        count(*) AS records,
        max(placed.position) + 1 AS turns,
        CASE count(*) WHEN count(calls.weight_version) THEN min(calls.weight_version) END AS weight_version_min,
        CASE count(*) WHEN count(calls.weight_version_end) THEN max(calls.weight_version_end) END
            AS weight_version_max,
        CASE
            WHEN count(*) = count(calls.temperature) AND min(calls.temperature) = max(calls.temperature)
                THEN min(calls.temperature)
        END AS temperature,
        CASE
            WHEN count(*) = count(calls.logprob_mode) AND min(calls.logprob_mode) = max(calls.logprob_mode)
                THEN min(calls.logprob_mode)
        END AS logprob_mode,
        arg_min(
            {
                'reason': calls.reason,
                'call_id': calls.call_id,
                'detail': calls.detail,
                'other_record': calls.other_record
            },
            placed.position
        ) FILTER (calls.reason IS NOT NULL) AS fault,
        any_value(coalesce(calls.first_sampled - 1, calls.mask_len)) FILTER (
            placed.position = 0
            AND calls.parent_call_id IS NULL
            AND calls.staged
            AND calls.ok_digest
            AND calls.ok_token_ids_present
            AND calls.ok_token_ids_positive
            AND calls.ok_token_ids_in_vocabulary
            AND calls.ok_mask
        ) AS prompt_len
    FROM placed
    LEFT JOIN verified_calls AS calls
        ON
            placed.group_id = calls.group_id
            AND placed.rollout_id = calls.rollout_id
            AND placed.attempt = calls.attempt
            AND placed.call_id = calls.call_id
    GROUP BY placed.group_id, placed.rollout_id, placed.attempt
),

ordered AS (
    SELECT
        *,
        CASE
            WHEN len(positions) = turns THEN list_grade_up(positions)
            ELSE list_transform(range(turns), LAMBDA place: list_position(positions, place::INTEGER))
        END AS places
    FROM folded
),

joined AS (
    SELECT
        * EXCLUDE (head, positions, places, call_ids, sampled_tokens, token_ids, token_mask, logprobs),
        head.rollout_index,
        head.n,
        head.purpose,
        head.closed_by,
        head.dispatch_weight_version,
        head.mixed_weight_version,
        head.min_delivered_fraction,
        head.min_valid_fraction_per_group,
        head.state,
        head.end_reason,
        head.reward,
        head.poison,
        head.poison_call_id,
        list_select(call_ids, places) AS call_ids,
        CASE
            WHEN terminal_call_id IS NULL THEN 0
            ELSE coalesce(list_sum(list_select(sampled_tokens, places)), 0)::BIGINT
        END AS sampled_tokens,
        flatten(list_select(token_ids, places)) AS input_ids,
        flatten(list_select(token_mask, places)) AS token_mask,
        flatten(list_select(logprobs, places)) AS logprobs
    FROM ordered
),

reasoned AS (
    SELECT
        *,
        CASE
            WHEN state IN ('open', 'frozen') THEN NULL
            WHEN state = 'failed' THEN coalesce(end_reason, 'rollout_failed')
            WHEN end_reason IS NOT NULL THEN end_reason
            WHEN poison IS NOT NULL THEN poison
            WHEN terminal_call_id IS NULL AND fault.reason IN ('parent_missing', 'parent_foreign') THEN fault.reason
            WHEN terminal_call_id IS NULL THEN terminal_reason
            WHEN fault.other_record AND records > turns THEN 'duplicate_record'
            WHEN fault IS NOT NULL THEN fault.reason
            WHEN reward IS NULL THEN 'reward_missing'
            WHEN isnan(reward) OR isinf(reward) THEN 'non_finite_reward'
            WHEN sampled_tokens = 0 THEN 'no_sampled_tokens'
            WHEN mixed_weight_version = 'reject' AND (weight_version_min IS DISTINCT FROM weight_version_max)
                THEN 'mixed_weight_version'
            WHEN sampled_tokens < min_delivered_fraction * attempt_sampled_tokens THEN 'undelivered'
        END AS word
    FROM joined
)

SELECT
    *,
    input_ids[1:prompt_len] AS prompt_ids,
    placeholder_reason(word, CASE WHEN end_reason IS NULL THEN 'capture_failed' ELSE 'rollout_failed' END) AS reason,
    CASE
        WHEN state IN ('open', 'frozen') THEN 'open'
        WHEN word IS NULL THEN 'valid'
        ELSE 'placeholder'
    END AS verdict
FROM reasoned;
