-- what: where the record of a committed call lies now that compaction has moved it from the place lineage names
-- grain: delta record
-- reads: tl_events, tl_places
SELECT
    places.writer,
    places.segment,
    places.byte_offset,
    places.byte_length,
    places.batch_row
FROM tl_events AS events
INNER JOIN tl_places AS places
    ON
        events.rollout_id = places.rollout_id
        AND coalesce(events.attempt, 0) = places.attempt
        AND events.call_id = places.call_id
        AND events.digest = places.digest
WHERE
    events.event_type = 'call_committed'
    AND events.writer = ?1
    AND events.segment = ?2
    AND events.byte_offset = ?3
    AND events.batch_row = ?4
ORDER BY places.shadowed;
