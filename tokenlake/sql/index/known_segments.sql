-- what: how far each segment has been read
-- grain: segment
-- reads: tl_segments
SELECT
    kind,
    writer,
    segment,
    scanned,
    ended
FROM tl_segments;
