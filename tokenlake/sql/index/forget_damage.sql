-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_damage
DELETE FROM tl_damage
WHERE kind = $kind AND writer = $writer AND segment = $segment;
