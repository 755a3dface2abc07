-- what: what lineage says of a group itself: its registration and the event that closed it
-- grain: group
-- reads: lineage
CREATE OR REPLACE VIEW group_records AS
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
    WHERE event_type IN ('group_registered', 'group_published', 'group_dropped') AND group_id IS NOT NULL
    GROUP BY group_id
)

SELECT
    group_id,
    opening.n AS n,
    coalesce(opening.purpose, 'train') AS purpose,
    opening.deadline_at AS deadline_at,
    opening.weight_version AS dispatch_weight_version,
    opening.meta AS meta,
    opening.registered_at AS registered_at,
    closing.event_type AS closed_by,
    closing.event_order AS closing_order,
    closing.closed_at AS closed_at,
    closing.cutoff_at AS cutoff_at,
    closing.segment AS segment,
    closing.weight_version AS published_min_wv,
    closing.weight_version_end AS published_max_wv,
    closing.policy AS policy,
    closing.reason AS drop_reason
FROM folded
WHERE opening IS NOT NULL;
