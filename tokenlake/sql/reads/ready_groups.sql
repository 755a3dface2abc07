-- what: published groups in the order of their publication
-- grain: group
-- reads: groups
SELECT group_id
FROM groups
WHERE state = 'published' AND (?1 IS NULL OR purpose = ?1)
ORDER BY published_at, group_id;
