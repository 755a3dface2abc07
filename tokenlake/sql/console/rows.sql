-- what: what there is to draw of the published rows of some groups; no token
-- grain: row
-- reads: ready_rows
SELECT
    group_id,
    sample_id,
    sample_mask,
    reason,
    reward,
    weight_version_min,
    turns,
    sampled_tokens,
    len(input_ids) AS tokens
FROM ready_rows
WHERE list_contains(?1, group_id);
