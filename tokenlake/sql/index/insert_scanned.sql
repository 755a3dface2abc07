-- what: remembers how far a segment has been read
-- grain: segment
-- reads: nothing
INSERT INTO tl_segments (kind, writer, segment, scanned, ended) VALUES ($kind, $writer, $segment, $scanned, $ended);
