-- what: where the deltas of some groups ?1 (a list) lie
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
    group_id,
    shadowed
FROM tl_places
WHERE group_id IN (SELECT unnest(?1::VARCHAR[]));
