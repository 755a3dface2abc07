-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_places
DELETE FROM tl_places
WHERE writer = ?1 AND segment = ?2;
