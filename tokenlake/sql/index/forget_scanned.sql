-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_segments
DELETE FROM tl_segments
WHERE kind = $kind AND writer = $writer AND segment = $segment;
