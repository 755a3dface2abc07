-- what: the runs of sampled tokens of the groups ?1 (a list) whose weight version is known, with their groups
-- grain: row x run of sampled tokens
-- reads: token_versions
SELECT
    group_id,
    sample_id,
    segment_index,
    begins,
    ends,
    weight_version
FROM token_versions
WHERE weight_version IS NOT NULL AND list_contains(?1::VARCHAR[], group_id);
