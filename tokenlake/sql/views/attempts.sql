-- what: the attempt of each rollout that counts, the highest registered, with its end, freeze and poison. What comes
--   after the end of the attempt, or after the group was published or dropped, changes nothing
-- grain: rollout
-- reads: lineage, group_records, group_of, json_text, placeholder_reason
CREATE OR REPLACE VIEW attempts AS
WITH events AS (
    SELECT
        rollout_id,
        event_type,
        reason,
        detail,
        reward,
        answered,
        call_id,
        terminal_call_id,
        terminal_selection,
        coalesce(group_id, group_of(rollout_id)) AS group_id,
        coalesce(attempt, 0) AS attempt,
        row(lineage.at, event_writer, event_seq) AS event_order
    FROM lineage
    WHERE
        rollout_id IS NOT NULL
        AND (
            event_type IN ('rollout_registered', 'call_failed', 'rollout_frozen', 'rollout_sealed', 'rollout_failed')
            OR (event_type = 'call_committed' AND detail LIKE '%"poison"%')
        )
),

folded AS (
    SELECT
        events.group_id,
        events.rollout_id,
        events.attempt,
        any_value(group_records.closing_order) AS closing_order,
        bool_or(events.event_type = 'rollout_registered') AS registered,
        arg_min(events.terminal_call_id, events.event_order)
            FILTER (events.event_type = 'rollout_frozen') AS frozen_terminal,
        bool_or(events.event_type = 'rollout_frozen') AS frozen,
        arg_min(
            {
                'kind': events.event_type,
                'reason': events.reason,
                'reward': events.reward,
                'terminal_call_id': events.terminal_call_id,
                'terminal_selection': events.terminal_selection,
                'event_order': events.event_order
            },
            events.event_order
        ) FILTER (
            events.event_type = 'rollout_sealed'
            OR (
                events.event_type = 'rollout_failed'
                AND coalesce(json_text(events.detail, '$.retry'), 'false') <> 'true'
            )
        ) AS ending,
        arg_min(
            {
                'reason': CASE events.event_type
                    WHEN 'call_failed' THEN placeholder_reason(events.reason, 'capture_failed')
                    ELSE placeholder_reason(json_text(events.detail, '$.poison'), 'unresolved_parent')
                END,
                'detail': events.reason,
                'call_id': events.call_id,
                'event_order': events.event_order
            },
            events.event_order
        ) FILTER (
            (events.event_type = 'call_failed' AND events.answered)
            OR (events.event_type = 'call_committed' AND json_text(events.detail, '$.poison') IS NOT NULL)
        )
            AS poison
    FROM events
    INNER JOIN group_records ON events.group_id = group_records.group_id
    WHERE group_records.closing_order IS NULL OR events.event_order <= group_records.closing_order
    GROUP BY events.group_id, events.rollout_id, events.attempt
)

SELECT
    group_id,
    rollout_id,
    attempt,
    registered,
    frozen,
    frozen_terminal,
    ending,
    closing_order,
    CASE
        WHEN ending IS NULL OR poison.event_order <= ending.event_order
            THEN poison
    END AS poison
FROM folded
WHERE registered OR ending IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY group_id, rollout_id ORDER BY registered DESC, attempt DESC) = 1;
