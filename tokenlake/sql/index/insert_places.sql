-- what: adds places that were read from a segment
-- grain: delta record
-- reads: tl_new
INSERT INTO tl_places
SELECT
    writer,
    segment,
    byte_offset,
    byte_length,
    batch_row,
    rollout_id,
    attempt,
    call_id,
    digest,
    staged_at,
    left(rollout_id, length(rollout_id) - 1 - strpos(reverse(rollout_id), 'g_')) AS group_id,
    FALSE AS shadowed
FROM tl_new;
