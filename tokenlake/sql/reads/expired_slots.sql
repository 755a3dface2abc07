-- what: slots of open groups that nobody ended although their deadline has passed at ?1 (microseconds since the epoch);
--   ?2 is the policy's deadline in seconds after registration or NULL, ?3 takes every deadline as passed, ?4 are the
--   groups to look at or NULL for all
-- grain: slot
-- reads: slots, group_records, attempts
SELECT
    slots.group_id,
    slots.rollout_id,
    coalesce(attempts.attempt, 0) AS attempt,
    'never_sealed' AS reason
FROM slots
INNER JOIN group_records ON slots.group_id = group_records.group_id
LEFT JOIN attempts ON slots.group_id = attempts.group_id AND slots.rollout_id = attempts.rollout_id
WHERE
    group_records.closed_by IS NULL
    AND attempts.ending IS NULL
    AND (?4 IS NULL OR list_contains(?4::VARCHAR[], slots.group_id))
    AND (
        ?3
        OR epoch_us(group_records.deadline_at) <= ?1
        OR epoch_us(group_records.registered_at) + ?2 * 1000000 <= ?1
    )
ORDER BY slots.group_id, slots.rollout_index;
