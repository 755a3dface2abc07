-- what: groups of which retention removed records: the whole group, or some of its rollouts
-- grain: group
-- reads: lineage, group_of
CREATE OR REPLACE VIEW retirements WITH (DEFER_BINDING) AS
SELECT
    coalesce(group_id, group_of(rollout_id)) AS group_id,
    bool_or(rollout_id IS NULL) AS whole,
    list(rollout_id) FILTER (rollout_id IS NOT NULL) AS rollouts
FROM lineage
WHERE event_type = 'retired'
GROUP BY ALL;
