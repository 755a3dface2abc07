-- what: what each consumer did last with each group that was handed to it: `claimed` until the lease ends, `consumed`
--   under a checkpoint of the trainer, `free` again, or `evicted` because it had become too old
-- grain: consumer x group
-- reads: lineage
CREATE OR REPLACE VIEW claims WITH (DEFER_BINDING) AS
WITH latest AS (
    SELECT
        consumer,
        group_id,
        arg_max(
            {
                'event_type': event_type,
                'claim_id': claim_id,
                'checkpoint': checkpoint,
                'reason': reason,
                'weight_version': weight_version,
                'deadline_at': deadline_at,
                'changed_at': lineage.at,
                'change_order': row(lineage.at, event_writer, event_seq)
            },
            row(lineage.at, event_writer, event_seq)
        ) AS change
    FROM lineage
    WHERE
        event_type IN ('rows_claimed', 'rows_consumed', 'rows_released')
        AND consumer IS NOT NULL
        AND group_id IS NOT NULL
    GROUP BY consumer, group_id
)

SELECT
    consumer,
    group_id,
    CASE
        WHEN change.event_type = 'rows_claimed' THEN 'claimed'
        WHEN change.event_type = 'rows_consumed' THEN 'consumed'
        WHEN change.claim_id IS NULL AND change.reason IN ('stale', 'unknown_version') THEN 'evicted'
        ELSE 'free'
    END AS state,
    change.claim_id AS claim_id,
    change.checkpoint AS "checkpoint",
    change.reason AS reason,
    change.weight_version AS weight_version,
    change.deadline_at AS deadline_at,
    change.changed_at AS changed_at,
    change.change_order AS change_order
FROM latest;
