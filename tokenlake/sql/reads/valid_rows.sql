-- what: the valid ready rows
-- grain: row
-- reads: ready_rows
SELECT
    rollout_id,
    call_ids,
    input_ids,
    token_mask,
    logprobs
FROM ready_rows
WHERE sample_mask = 1
ORDER BY group_id, length(sample_id), sample_id;
