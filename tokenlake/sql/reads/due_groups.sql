-- what: groups that are due, all or of the list ?1
-- grain: group
-- reads: group_states
SELECT group_id
FROM group_states
WHERE state = 'due' AND (?1 IS NULL OR list_contains(?1::VARCHAR[], group_id))
ORDER BY group_id;
