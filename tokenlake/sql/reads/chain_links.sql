-- what: the calls of every rollout's terminal chain, root first
-- grain: rollout x call
-- reads: chains, calls
SELECT
    chains.rollout_id,
    chains.call_id,
    calls.weight_version,
    calls.cum_len,
    calls.sampled_tokens
FROM chains
INNER JOIN calls
    ON chains.rollout_id = calls.rollout_id AND chains.attempt = calls.attempt AND chains.call_id = calls.call_id
ORDER BY chains.rollout_id, chains.position;
