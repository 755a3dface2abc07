-- what: published groups of every purpose with the file that holds their rows, in the order of their publication
-- grain: group
-- reads: group_records
SELECT
    group_id,
    segment,
    n,
    purpose
FROM group_records
WHERE closed_by = 'group_published'
ORDER BY closing_order;
