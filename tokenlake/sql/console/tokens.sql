-- what: positions ?3 to ?4 (from 0, the last one not included) of a rollout's terminal chain, a call at a time
-- grain: call
-- reads: chains, deltas
SELECT
    chains.position,
    chains.call_id,
    deltas.weight_version,
    deltas.weight_version_spans,
    deltas.prev_len,
    deltas.cum_len,
    greatest(deltas.prev_len, ?3)::BIGINT AS first,
    coalesce(list_sum(deltas.token_mask[1:greatest(?3 - deltas.prev_len, 0)]), 0)::BIGINT AS sampled_before,
    deltas.token_ids[greatest(?3 - deltas.prev_len, 0) + 1:greatest(?4 - deltas.prev_len, 0)] AS token_ids,
    deltas.token_mask[greatest(?3 - deltas.prev_len, 0) + 1:greatest(?4 - deltas.prev_len, 0)] AS token_mask,
    deltas.logprobs[greatest(?3 - deltas.prev_len, 0) + 1:greatest(?4 - deltas.prev_len, 0)] AS logprobs
FROM chains
INNER JOIN deltas
    ON
        chains.rollout_id = deltas.rollout_id
        AND chains.attempt = deltas.attempt
        AND chains.call_id = deltas.call_id
WHERE
    chains.group_id = ?1
    AND chains.rollout_id = ?2
    AND deltas.prev_len < ?4
    AND deltas.cum_len > ?3
ORDER BY chains.position;
