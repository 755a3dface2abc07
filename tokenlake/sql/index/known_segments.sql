-- what: how far each segment has been read
-- grain: segment
-- reads: tl_segments
SELECT
    kind,
    writer,
    segment,
    scanned,
    ended,
    inode
FROM tl_segments;
