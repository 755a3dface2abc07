-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_damage
DELETE FROM tl_damage
WHERE kind = ?1 AND writer = ?2 AND segment = ?3;
