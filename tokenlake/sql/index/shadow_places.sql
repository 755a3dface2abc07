-- what: marks all but the last of identical copies, among the rollouts given; NULL: among all
-- grain: delta record
-- reads: tl_places
UPDATE tl_places
SET shadowed = (row(staged_at, writer, segment, byte_offset, batch_row) <> copies.last_copy)
FROM (
    SELECT
        rollout_id,
        attempt,
        call_id,
        digest,
        max(row(staged_at, writer, segment, byte_offset, batch_row)) AS last_copy
    FROM tl_places
    WHERE ?1 IS NULL OR rollout_id IN (SELECT unnest(?1::VARCHAR[]))
    GROUP BY ALL
    HAVING count(*) > 1 OR bool_or(shadowed)
) AS copies
WHERE
    tl_places.rollout_id = copies.rollout_id
    AND tl_places.attempt = copies.attempt
    AND tl_places.call_id = copies.call_id
    AND tl_places.digest = copies.digest;
