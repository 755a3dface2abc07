-- what: every place of every group with its verdict and, when it has a terminal, its sequence: what `rollouts`,
--   `linear_rows` and `publishable_rows` are cut from, so that tokens are read once. Arrays are put in order after the
--   fold, which is cheaper than ordering tokens inside it; a second copy of a record counts once. Without a terminal the
--   first root is read for its prompt and the first orphan for its reason
-- grain: rollout
-- reads: rollout_trees, verified_calls, placeholder_reason
CREATE OR REPLACE VIEW judged_rollouts AS
WITH wanted AS (
    SELECT
        group_id,
        rollout_id,
        attempt_record.attempt AS attempt,
        {
            'record': attempt_record,
            'calls': calls,
            'sampled_tokens': attempt_sampled_tokens,
            'terminal_call_id': terminal_call_id,
            'terminal_selection': terminal_selection,
            'terminal_reason': terminal_reason,
            'truncated': truncated
        } AS head,
        CASE
            WHEN path IS NOT NULL THEN list_transform(path, lambda number: call_ids[number])
            ELSE [first_root, first_orphan]
        END AS call_ids
    FROM rollout_trees
),

placed AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        head,
        unnest(call_ids) AS call_id,
        generate_subscripts(call_ids, 1)::INTEGER - 1 AS position
    FROM wanted
),

folded AS (
    SELECT
        placed.group_id,
        placed.rollout_id,
        any_value(placed.head) AS head,
        list(placed.position) AS positions,
        list(placed.call_id) AS call_ids,
        list(calls.sampled_tokens) AS sampled_tokens,
        list(calls.token_ids) AS token_ids,
        list(calls.token_mask) AS token_mask,
        list(calls.logprobs) AS logprobs,
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
            {'reason': calls.reason, 'call_id': calls.call_id, 'detail': calls.detail},
            placed.position
        ) FILTER (calls.reason IS NOT NULL) AS fault,
        any_value(calls.mask_len - coalesce(calls.mask_sum, 0)) FILTER (
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
    GROUP BY placed.group_id, placed.rollout_id
),

ordered AS (
    SELECT
        *,
        CASE
            WHEN len(positions) = turns THEN list_grade_up(positions)
            ELSE list_transform(range(turns), lambda place: list_position(positions, place::INTEGER))
        END AS places
    FROM folded
),

joined AS (
    SELECT
        group_id,
        rollout_id,
        head.record AS record,
        head.calls AS calls,
        head.sampled_tokens AS attempt_sampled_tokens,
        head.terminal_call_id AS terminal_call_id,
        head.terminal_selection AS terminal_selection,
        head.terminal_reason AS terminal_reason,
        head.truncated AS truncated,
        head.record.ending AS ending,
        head.record.poison AS poison,
        head.record.ending.reward AS reward,
        turns,
        weight_version_min,
        weight_version_max,
        temperature,
        logprob_mode,
        fault,
        list_select(call_ids, places) AS call_ids,
        CASE
            WHEN head.terminal_call_id IS NULL THEN 0
            ELSE coalesce(list_sum(list_select(sampled_tokens, places)), 0)::BIGINT
        END AS sampled_tokens,
        flatten(list_select(token_ids, places)) AS input_ids,
        flatten(list_select(token_mask, places)) AS token_mask,
        flatten(list_select(logprobs, places)) AS logprobs,
        flatten(list_select(token_ids, places))[1:prompt_len] AS prompt_ids,
        CASE
            WHEN head.record.ending.kind = 'rollout_failed' THEN 'failed'
            WHEN head.record.ending.kind = 'rollout_sealed' THEN 'sealed'
            WHEN head.record.frozen THEN 'frozen'
            ELSE 'open'
        END AS state
    FROM ordered
),

reasoned AS (
    SELECT
        *,
        CASE
            WHEN state IN ('open', 'frozen') THEN NULL
            WHEN state = 'failed' OR ending.reason IS NOT NULL
                THEN placeholder_reason(ending.reason, 'rollout_failed')
            WHEN poison IS NOT NULL THEN poison.reason
            WHEN terminal_call_id IS NULL
                THEN
                    CASE
                        WHEN fault.reason IN ('parent_missing', 'parent_foreign') THEN fault.reason
                        ELSE terminal_reason
                    END
            WHEN fault IS NOT NULL THEN fault.reason
            WHEN reward IS NULL THEN 'reward_missing'
            WHEN isnan(reward) OR isinf(reward) THEN 'non_finite_reward'
            WHEN sampled_tokens = 0 THEN 'no_sampled_tokens'
            WHEN
                record.mixed_weight_version = 'reject'
                AND weight_version_min IS DISTINCT FROM weight_version_max
                THEN 'mixed_weight_version'
            WHEN sampled_tokens < record.min_delivered_fraction * attempt_sampled_tokens THEN 'undelivered'
        END AS reason
    FROM joined
)

SELECT
    * EXCLUDE (ending, poison, record, fault),
    ending,
    poison,
    fault,
    record.attempt AS attempt,
    record.rollout_index AS rollout_index,
    record.n AS n,
    record.purpose AS purpose,
    record.closed_by AS closed_by,
    record.dispatch_weight_version AS dispatch_weight_version,
    record.min_valid_fraction_per_group AS min_valid_fraction_per_group,
    CASE
        WHEN state IN ('open', 'frozen') THEN 'open'
        WHEN reason IS NULL THEN 'valid'
        ELSE 'placeholder'
    END AS verdict
FROM reasoned;
