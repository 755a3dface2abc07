-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_events
DELETE FROM tl_events
WHERE tl_writer = ?1 AND tl_segment = ?2;
