-- what: the groups that were registered last
-- grain: group
-- reads: group_states
SELECT
    group_id,
    n,
    state,
    ended,
    purpose,
    registered_at,
    deadline_at,
    closed_at,
    published_min_wv,
    published_max_wv,
    drop_reason,
    meta
FROM group_states
ORDER BY closed_at IS NOT NULL, registered_at DESC, group_id DESC
LIMIT ?1;
