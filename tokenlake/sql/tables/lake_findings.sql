-- what: what is wrong with the files themselves: unreadable stretches, lost lineage, broken chains of events
-- grain: finding
-- reads: tl_damage, tl_anchors, tl_events
CREATE OR REPLACE VIEW lake_findings WITH (DEFER_BINDING) AS
WITH linked AS (
    SELECT
        event_writer,
        event_seq,
        prev_hash,
        lag(event_seq, 1, -1) OVER before AS last_seq,
        lag(event_hash) OVER before AS last_hash
    FROM tl_events
    WINDOW before AS (PARTITION BY event_writer ORDER BY event_seq, tl_segment)
)

SELECT
    'segment_damaged' AS kind,
    place,
    detail
FROM tl_damage
UNION ALL
SELECT
    'lineage_broken' AS kind,
    'lineage/' || event_writer AS place,
    'event ' || event_seq || ' does not follow event ' || last_seq AS detail
FROM linked
WHERE
    event_seq <> last_seq + 1
    OR (last_hash IS NOT NULL AND prev_hash <> last_hash)
    OR (last_hash IS NULL AND prev_hash <> unhex(repeat('00', 32)))
UNION ALL
SELECT
    'lineage_lost' AS kind,
    'lineage/' || tl_anchors.writer AS place,
    coalesce(
        'event ' || tl_anchors.event_seq || ' was acknowledged and is not there', 'the anchor is unreadable'
    ) AS detail
FROM tl_anchors
WHERE
    NOT EXISTS (
        SELECT 1
        FROM tl_events
        WHERE
            tl_events.event_writer = tl_anchors.writer
            AND tl_events.event_seq = tl_anchors.event_seq
            AND lower(hex(tl_events.event_hash)) = tl_anchors.event_hash
    )
UNION ALL
SELECT
    'lineage_lost' AS kind,
    'lineage/' || event_writer AS place,
    'the anchor is not there' AS detail
FROM tl_events
WHERE event_type = 'lake_opened' AND event_writer NOT IN (SELECT tl_anchors.writer FROM tl_anchors)
GROUP BY event_writer
HAVING count(*) > 1;
