-- what: the rollouts of one group, in order
-- grain: rollout
-- reads: rollouts
SELECT *
FROM rollouts
WHERE group_id = ?1
ORDER BY rollout_index;
