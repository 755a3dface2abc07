-- what: calls that the gate answered with an empty `length` turn because the context was full
-- grain: call
-- reads: lineage, group_of
CREATE OR REPLACE VIEW overflows AS
SELECT
    rollout_id,
    call_id,
    coalesce(group_id, group_of(rollout_id)) AS group_id,
    coalesce(attempt, 0) AS attempt,
    any_value(parent_call_id) AS parent_call_id
FROM lineage
WHERE event_type = 'call_overflowed' AND rollout_id IS NOT NULL AND call_id IS NOT NULL
GROUP BY ALL;
