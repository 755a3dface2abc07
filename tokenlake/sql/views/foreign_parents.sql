-- what: calls whose claimed parent is not in their attempt but in another rollout or attempt of their group
-- grain: call
-- reads: committed_calls
CREATE OR REPLACE VIEW foreign_parents AS
SELECT DISTINCT
    orphans.group_id,
    orphans.rollout_id,
    orphans.attempt,
    orphans.call_id
FROM (
    SELECT
        calls.group_id,
        calls.rollout_id,
        calls.attempt,
        calls.call_id,
        calls.parent_call_id
    FROM committed_calls AS calls
    LEFT JOIN committed_calls AS parents
        ON
            calls.group_id = parents.group_id
            AND calls.rollout_id = parents.rollout_id
            AND calls.attempt = parents.attempt
            AND calls.parent_call_id = parents.call_id
    WHERE calls.parent_call_id IS NOT NULL AND parents.call_id IS NULL
) AS orphans
INNER JOIN committed_calls AS others
    ON
        orphans.group_id = others.group_id
        AND orphans.parent_call_id = others.call_id;
