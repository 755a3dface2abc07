-- what: the verdict on one rollout
-- grain: one row, or none when there is no such rollout
-- reads: rollouts, groups
SELECT
    rollouts.*,
    groups.state AS group_state
FROM rollouts
INNER JOIN groups ON rollouts.group_id = groups.group_id
WHERE rollouts.rollout_id = ?1 AND rollouts.group_id = ?2;
