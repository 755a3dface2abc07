-- what: the N places of every registered group
-- grain: rollout
-- reads: group_records
CREATE OR REPLACE VIEW slots WITH (DEFER_BINDING) AS
WITH numbered AS (
    SELECT
        group_id,
        n,
        purpose,
        closed_by,
        closing_order,
        dispatch_weight_version,
        mixed_weight_version,
        min_delivered_fraction,
        min_valid_fraction_per_group,
        mixed_weight_version_per_group,
        row_policy,
        unnest(range(n))::INTEGER AS rollout_index
    FROM group_records
)

SELECT
    *,
    concat(group_id, '_g', rollout_index) AS rollout_id
FROM numbered;
