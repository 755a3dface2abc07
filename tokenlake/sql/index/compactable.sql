-- what: the sealed segments of deltas that hold no damage, with what compaction chooses by; `retired`: records that
--   retention removes
-- grain: segment
-- reads: tl_segments, tl_places, tl_damage, retirements
SELECT
    segments.writer,
    segments.segment,
    count(places.call_id) AS records,
    count(DISTINCT places.byte_offset) AS batches,
    coalesce(max(places.byte_offset + places.byte_length), 0) AS size,
    count(*) FILTER (
        coalesce(retirements.whole OR list_contains(retirements.rollouts, places.rollout_id), FALSE)
    ) AS retired
FROM tl_segments AS segments
LEFT JOIN tl_places AS places
    ON
        segments.writer = places.writer
        AND segments.segment = places.segment
LEFT JOIN retirements ON places.group_id = retirements.group_id
WHERE
    segments.kind = 'deltas'
    AND segments.ended
    AND NOT EXISTS (
        SELECT 1
        FROM tl_damage
        WHERE
            tl_damage.kind = 'deltas'
            AND tl_damage.writer = segments.writer
            AND tl_damage.segment = segments.segment
    )
GROUP BY segments.writer, segments.segment
ORDER BY min(places.staged_at), segments.writer, segments.segment;
