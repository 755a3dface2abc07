-- what: groups, rollouts and calls whose id, or a call's response id or served text, holds ?1, and published
--   placeholders whose reason is ?1, at most ?2
-- grain: thing found
-- reads: group_records, slots, ready_rows, calls
SELECT
    'group' AS kind,
    group_id,
    NULL AS rollout_id,
    group_id AS found
FROM group_records
WHERE contains(lower(group_id), lower(?1))
UNION ALL
SELECT
    'rollout' AS kind,
    group_id,
    rollout_id,
    rollout_id AS found
FROM slots
WHERE contains(lower(rollout_id), lower(?1))
UNION ALL
SELECT
    'placeholder' AS kind,
    group_id,
    rollout_id,
    reason AS found
FROM ready_rows
WHERE sample_mask = 0 AND reason = lower(?1)
UNION ALL
SELECT
    'call' AS kind,
    group_id,
    rollout_id,
    call_id AS found
FROM calls
WHERE
    contains(lower(call_id), lower(?1))
    OR contains(lower(response_id), lower(?1))
    OR contains(lower(served_text), lower(?1))
ORDER BY kind DESC, found ASC
LIMIT ?2;
