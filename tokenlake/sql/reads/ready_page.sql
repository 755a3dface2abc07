-- what: published groups of purpose ?1 (NULL: any) in the order of their publication, ?3 of them after the first ?2
-- grain: group
-- reads: group_records
SELECT group_id
FROM group_records
WHERE closed_by = 'group_published' AND (?1 IS NULL OR purpose = ?1)
ORDER BY closing_order
LIMIT ?3 OFFSET ?2;
