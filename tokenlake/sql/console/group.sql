-- what: one group
-- grain: one row, or none when the group is unknown
-- reads: groups
SELECT *
FROM groups
WHERE group_id = ?1;
