-- what: how far each segment has been read; `checked`: of a segment of deltas that was open, where the last record
--   begins that has so many bytes behind it
-- grain: segment
-- reads: tl_segments, tl_places
SELECT
    segments.kind,
    segments.writer,
    segments.segment,
    segments.scanned,
    segments.ended,
    segments.inode,
    coalesce(max(places.byte_offset), 0) AS checked
FROM tl_segments AS segments
LEFT JOIN tl_places AS places
    ON
        segments.kind = 'deltas'
        AND NOT segments.ended
        AND segments.writer = places.writer
        AND segments.segment = places.segment
        AND places.byte_offset + ?1 <= segments.scanned
GROUP BY ALL;
