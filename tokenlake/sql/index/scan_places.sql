-- what: where each record of the relation `deltas` lies
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
WHERE NOT shadowed;
