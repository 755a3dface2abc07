-- what: where the records of the relation `deltas` lie: of some groups ?1 (a list), or of all where that is NULL
-- grain: delta record
-- reads: tl_places
SELECT
    writer,
    segment,
    byte_offset,
    byte_length,
    batch_row,
    rollout_id,
    attempt,
    call_id,
    group_id
FROM tl_places
WHERE NOT shadowed AND (?1 IS NULL OR group_id IN (SELECT unnest(?1::VARCHAR[])));
