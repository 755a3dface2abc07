-- what: published groups ?1 (a list) with the file that holds their rows
-- grain: group
-- reads: group_records
SELECT
    group_id,
    segment,
    n
FROM group_records
WHERE closed_by = 'group_published' AND list_contains(?1::VARCHAR[], group_id);
