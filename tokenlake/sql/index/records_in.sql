-- what: the records of some segments of deltas, one rollout's calls together in the order they were staged; `share`:
--   bytes that fall to the record; the `copy_` columns: for one that is shadowed, the copy that stands for it
-- grain: delta record
-- reads: tl_places, retirements
WITH chosen AS (
    SELECT
        unnest(?1::VARCHAR[]) AS writer,
        unnest(?2::INTEGER[]) AS segment
)

SELECT
    places.writer,
    places.segment,
    places.byte_offset,
    places.byte_length,
    places.batch_row,
    places.rollout_id,
    places.attempt,
    places.call_id,
    places.byte_length
    // count(*) OVER (PARTITION BY places.writer, places.segment, places.byte_offset) AS share,
    coalesce(retirements.whole OR list_contains(retirements.rollouts, places.rollout_id), FALSE) AS retired,
    copies.writer AS copy_writer,
    copies.segment AS copy_segment,
    copies.byte_offset AS copy_offset,
    copies.byte_length AS copy_length,
    copies.batch_row AS copy_row
FROM tl_places AS places
INNER JOIN chosen
    ON
        places.writer = chosen.writer
        AND places.segment = chosen.segment
LEFT JOIN retirements ON places.group_id = retirements.group_id
LEFT JOIN tl_places AS copies
    ON
        places.shadowed
        AND NOT copies.shadowed
        AND places.rollout_id = copies.rollout_id
        AND places.attempt = copies.attempt
        AND places.call_id = copies.call_id
        AND places.digest = copies.digest
ORDER BY places.rollout_id, places.attempt, places.staged_at, places.call_id;
