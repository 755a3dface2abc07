-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_events
DELETE FROM tl_events
WHERE tl_writer = $writer AND tl_segment = $segment;
