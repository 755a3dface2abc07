-- what: one registered group and whether it is published
-- grain: one row, or none when the group is unknown
-- reads: lineage
SELECT
    max(n) AS n,
    max(purpose) AS purpose,
    max(detail) FILTER (event_type = 'group_registered') AS meta,
    bool_or(event_type IN ('group_published', 'group_dropped')) AS closed
FROM lineage
WHERE group_id = ?1 AND event_type IN ('group_registered', 'group_published', 'group_dropped')
HAVING bool_or(event_type = 'group_registered');
