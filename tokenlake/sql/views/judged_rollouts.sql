-- what: every place of every group with its verdict and, when it has a terminal, its sequence: what `rollouts`,
--   `linear_rows` and `publishable_rows` are cut from, so that tokens are read once
-- grain: rollout
-- reads: slots, attempts, terminals, chain_arrays, placeholder_reason
CREATE OR REPLACE VIEW judged_rollouts AS
WITH joined AS (
    SELECT
        slots.group_id,
        slots.rollout_id,
        slots.rollout_index,
        slots.n,
        slots.purpose,
        slots.closed_by,
        slots.dispatch_weight_version,
        slots.min_valid_fraction_per_group,
        slots.mixed_weight_version,
        slots.min_delivered_fraction,
        attempts.registered,
        attempts.poison,
        attempts.ending,
        attempts.ending.reward AS reward,
        terminals.terminal_call_id,
        terminals.terminal_selection,
        terminals.reason AS terminal_reason,
        arrays.turns,
        arrays.weight_version_min,
        arrays.weight_version_max,
        arrays.temperature,
        arrays.logprob_mode,
        arrays.fault,
        arrays.call_ids,
        arrays.input_ids,
        arrays.token_mask,
        arrays.logprobs,
        arrays.input_ids[1:arrays.prompt_len] AS prompt_ids,
        coalesce(attempts.attempt, 0) AS attempt,
        coalesce(terminals.truncated, FALSE) AS truncated,
        coalesce(terminals.calls, 0) AS calls,
        coalesce(terminals.attempt_sampled_tokens, 0) AS attempt_sampled_tokens,
        CASE WHEN terminals.terminal_call_id IS NULL THEN 0 ELSE coalesce(arrays.sampled_tokens, 0) END
            AS sampled_tokens,
        CASE
            WHEN attempts.ending.kind = 'rollout_failed' THEN 'failed'
            WHEN attempts.ending.kind = 'rollout_sealed' THEN 'sealed'
            WHEN attempts.frozen THEN 'frozen'
            ELSE 'open'
        END AS state
    FROM slots
    LEFT JOIN attempts
        ON
            slots.group_id = attempts.group_id
            AND slots.rollout_id = attempts.rollout_id
    LEFT JOIN terminals
        ON
            slots.group_id = terminals.group_id
            AND slots.rollout_id = terminals.rollout_id
    LEFT JOIN chain_arrays AS arrays
        ON
            slots.group_id = arrays.group_id
            AND slots.rollout_id = arrays.rollout_id
),

reasoned AS (
    SELECT
        *,
        CASE
            WHEN state IN ('open', 'frozen') THEN NULL
            WHEN state = 'failed' THEN placeholder_reason(ending.reason, 'rollout_failed')
            WHEN ending.reason IS NOT NULL THEN placeholder_reason(ending.reason, 'rollout_failed')
            WHEN poison IS NOT NULL THEN poison.reason
            WHEN terminal_call_id IS NULL THEN coalesce(terminal_reason, 'terminal_unknown')
            WHEN fault IS NOT NULL THEN fault.reason
            WHEN turns IS NULL THEN 'delta_missing'
            WHEN reward IS NULL THEN 'reward_missing'
            WHEN isnan(reward) OR isinf(reward) THEN 'non_finite_reward'
            WHEN sampled_tokens = 0 THEN 'no_sampled_tokens'
            WHEN mixed_weight_version = 'reject' AND weight_version_min IS DISTINCT FROM weight_version_max
                THEN 'mixed_weight_version'
            WHEN sampled_tokens < min_delivered_fraction * attempt_sampled_tokens THEN 'undelivered'
        END AS reason
    FROM joined
)

SELECT
    *,
    CASE
        WHEN state IN ('open', 'frozen') THEN 'open'
        WHEN reason IS NULL THEN 'valid'
        ELSE 'placeholder'
    END AS verdict
FROM reasoned;
