-- what: how far each segment has been read; `checked`: of a segment of deltas that was open, where the last record
--   begins that has so many bytes behind it
-- grain: segment
-- reads: tl_segments, tl_places
WITH checks AS (
    SELECT
        segments.writer,
        segments.segment,
        max(places.byte_offset) AS checked
    FROM tl_segments AS segments
    INNER JOIN tl_places AS places
        ON
            segments.writer = places.writer
            AND segments.segment = places.segment
    WHERE
        segments.kind = 'deltas'
        AND NOT segments.ended
        AND places.byte_offset + ?1 <= segments.scanned
    GROUP BY segments.writer, segments.segment
)

SELECT
    segments.kind,
    segments.writer,
    segments.segment,
    segments.scanned,
    segments.ended,
    segments.inode,
    coalesce(checks.checked, 0) AS checked
FROM tl_segments AS segments
LEFT JOIN checks
    ON
        segments.kind = 'deltas'
        AND segments.writer = checks.writer
        AND segments.segment = checks.segment;
