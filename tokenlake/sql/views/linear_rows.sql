-- what: the sequence of each terminal chain, whether or not it passes its checks: ids, mask and logprobs in parallel
-- grain: rollout
-- reads: attempts, terminals, chain_arrays
CREATE OR REPLACE VIEW linear_rows AS
SELECT
    arrays.rollout_id,
    arrays.group_id,
    arrays.attempt,
    terminals.terminal_call_id,
    arrays.call_ids,
    arrays.turns,
    arrays.input_ids,
    arrays.token_mask,
    arrays.logprobs,
    arrays.weight_version_min,
    arrays.weight_version_max,
    arrays.sampled_tokens,
    terminals.attempt_sampled_tokens - arrays.sampled_tokens AS dropped_sampled_tokens,
    arrays.temperature,
    arrays.logprob_mode,
    terminals.truncated,
    arrays.input_ids[1:arrays.prompt_len] AS prompt_ids,
    arrays.fault.reason AS reason
FROM terminals
INNER JOIN chain_arrays AS arrays
    ON
        terminals.group_id = arrays.group_id
        AND terminals.rollout_id = arrays.rollout_id
WHERE terminals.terminal_call_id IS NOT NULL;
