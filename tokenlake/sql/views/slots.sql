-- what: the N places of every registered group, with the policy they are judged by: the one that publishing pinned, else
--   the one in force
-- grain: rollout
-- reads: group_records, policies, json_text
CREATE OR REPLACE VIEW slots AS
WITH numbered AS (
    SELECT
        groups.group_id,
        groups.n,
        groups.purpose,
        groups.closed_by,
        groups.closing_order,
        groups.dispatch_weight_version,
        coalesce(json_text(groups.policy, '$.mixed_weight_version'), policies.mixed_weight_version)
            AS mixed_weight_version,
        coalesce(
            try_cast(json_text(groups.policy, '$.min_delivered_fraction') AS DOUBLE),
            policies.min_delivered_fraction
        ) AS min_delivered_fraction,
        coalesce(
            try_cast(json_text(groups.policy, '$.min_valid_fraction_per_group') AS DOUBLE),
            policies.min_valid_fraction_per_group
        ) AS min_valid_fraction_per_group,
        unnest(range(groups.n))::INTEGER AS rollout_index
    FROM group_records AS groups
    CROSS JOIN policies
)

SELECT
    *,
    concat(group_id, '_g', rollout_index) AS rollout_id
FROM numbered;
