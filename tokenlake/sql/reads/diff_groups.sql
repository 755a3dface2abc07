-- what: the groups with published rows, in order; one, or all for NULL
-- grain: group
-- reads: group_records
SELECT group_id
FROM group_records
WHERE closed_by = 'group_published' AND (?1 IS NULL OR group_id = ?1)
ORDER BY group_id;
