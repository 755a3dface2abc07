-- what: what lineage says of a group itself: its registration, the event that closed it, and the policies it is
--   judged by: those that publishing pinned, else those in force
-- grain: group
-- reads: lineage, policies, json_text
CREATE OR REPLACE VIEW group_records WITH (DEFER_BINDING) AS
WITH folded AS (
    SELECT
        group_id,
        arg_min(
            {
                'n': n,
                'purpose': purpose,
                'deadline_at': deadline_at,
                'weight_version': weight_version,
                'meta': detail,
                'registered_at': lineage.at
            },
            row(lineage.at, event_writer, event_seq)
        ) FILTER (event_type = 'group_registered') AS opening,
        arg_min(
            {
                'event_type': event_type,
                'event_order': row(lineage.at, event_writer, event_seq),
                'closed_at': lineage.at,
                'cutoff_at': cutoff_at,
                'segment': segment,
                'weight_version': weight_version,
                'weight_version_end': weight_version_end,
                'policy': CASE event_type WHEN 'group_published' THEN detail END,
                'reason': reason
            },
            row(lineage.at, event_writer, event_seq)
        ) FILTER (event_type <> 'group_registered') AS closing
    FROM lineage
    -- No other event lies between: a scan looks at a range while it reads, and at a list of names only afterwards.
    WHERE event_type BETWEEN 'group_dropped' AND 'group_registered' AND group_id IS NOT NULL
    GROUP BY group_id
)

SELECT
    folded.group_id,
    folded.opening.n,
    folded.opening.deadline_at,
    folded.opening.weight_version AS dispatch_weight_version,
    folded.opening.meta,
    folded.opening.registered_at,
    folded.closing.event_type AS closed_by,
    folded.closing.event_order AS closing_order,
    folded.closing.closed_at,
    folded.closing.cutoff_at,
    folded.closing.segment,
    folded.closing.weight_version AS published_min_wv,
    folded.closing.weight_version_end AS published_max_wv,
    folded.closing.reason AS drop_reason,
    coalesce(folded.opening.purpose, 'train') AS purpose,
    coalesce(json_text(folded.closing.policy, '$.mixed_weight_version'), policies.mixed_weight_version)
        AS mixed_weight_version,
    coalesce(
        try_cast(json_text(folded.closing.policy, '$.min_delivered_fraction') AS DOUBLE),
        policies.min_delivered_fraction
    ) AS min_delivered_fraction,
    coalesce(
        try_cast(json_text(folded.closing.policy, '$.min_valid_fraction_per_group') AS DOUBLE),
        policies.min_valid_fraction_per_group
    ) AS min_valid_fraction_per_group,
    coalesce(
        json_text(folded.closing.policy, '$.mixed_weight_version_per_group'), policies.mixed_weight_version_per_group
    ) AS mixed_weight_version_per_group,
    coalesce(json_text(folded.closing.policy, '$.rows'), policies.rows) AS row_policy
FROM folded
CROSS JOIN policies
WHERE folded.opening IS NOT NULL;
