-- what: the place and digest of a delta by its key, the last copy first
-- grain: delta record
-- reads: tl_places
SELECT
    writer,
    segment,
    byte_offset,
    byte_length,
    batch_row,
    digest
FROM tl_places
WHERE rollout_id = ?1 AND attempt = ?2 AND call_id = ?3
ORDER BY staged_at DESC, writer DESC, segment DESC, byte_offset DESC;
