-- what: the sequence of each terminal chain, whether or not it passes its checks: ids, mask and logprobs in parallel
-- grain: rollout
-- reads: judged_rollouts
CREATE OR REPLACE VIEW linear_rows WITH (DEFER_BINDING) AS
SELECT
    rollout_id,
    group_id,
    attempt,
    terminal_call_id,
    call_ids,
    turns,
    input_ids,
    token_mask,
    logprobs,
    weight_version_min,
    weight_version_max,
    sampled_tokens,
    attempt_sampled_tokens - sampled_tokens AS dropped_sampled_tokens,
    temperature,
    logprob_mode,
    truncated,
    prompt_ids,
    fault.reason
FROM judged_rollouts
WHERE terminal_call_id IS NOT NULL;
