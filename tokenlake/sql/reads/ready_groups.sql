-- what: published groups with the file that holds their rows, in the order of their publication
-- grain: group
-- reads: group_records
SELECT
    group_id,
    segment,
    n
FROM group_records
WHERE closed_by = 'group_published' AND (?1 IS NULL OR purpose = ?1)
ORDER BY closing_order;
