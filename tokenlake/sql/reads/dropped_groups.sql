-- what: those of the groups ?1 that a policy drops instead of publishing, and which one
-- grain: group
-- reads: groups
SELECT
    group_id,
    valid,
    drop_reason
FROM groups
WHERE verdict = 'drop' AND list_contains(?1::VARCHAR[], group_id);
