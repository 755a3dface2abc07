-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_segments
DELETE FROM tl_segments
WHERE kind = ?1 AND writer = ?2 AND segment = ?3;
