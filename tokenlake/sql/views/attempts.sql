-- what: every place of every group with the attempt that counts, the highest registered: how it ended, what poisons
--   it, its overflowed calls. What comes after the group was published or dropped changes nothing
-- grain: rollout
-- reads: slots, lineage, group_of, json_text
CREATE OR REPLACE VIEW attempts WITH (DEFER_BINDING) AS
WITH events AS (
    SELECT
        rollout_id,
        event_type,
        reason,
        detail,
        reward,
        call_id,
        parent_call_id,
        terminal_call_id,
        terminal_selection,
        coalesce(group_id, group_of(rollout_id)) AS group_id,
        coalesce(attempt, 0) AS attempt,
        row(lineage.at, event_writer, event_seq) AS event_order,
        CASE
            WHEN event_type = 'call_committed' THEN coalesce(json_text(detail, '$.poison'), '') <> ''
            ELSE event_type = 'call_failed' AND coalesce(answered, FALSE)
        END AS poisons,
        event_type = 'rollout_sealed'
        OR (event_type = 'rollout_failed' AND coalesce(json_text(detail, '$.retry'), 'false') <> 'true') AS ends
    FROM lineage
    WHERE
        starts_with(event_type, 'rollout_')
        OR event_type IN ('call_failed', 'call_overflowed')
        OR (event_type = 'call_committed' AND detail LIKE '%"poison"%')
),

folded AS (
    SELECT
        slots.group_id,
        slots.rollout_id,
        any_value(slots.rollout_index) AS rollout_index,
        any_value(slots.n) AS n,
        any_value(slots.purpose) AS purpose,
        any_value(slots.closed_by) AS closed_by,
        any_value(slots.closing_order) AS closing_order,
        any_value(slots.dispatch_weight_version) AS dispatch_weight_version,
        any_value(slots.mixed_weight_version) AS mixed_weight_version,
        any_value(slots.min_delivered_fraction) AS min_delivered_fraction,
        any_value(slots.min_valid_fraction_per_group) AS min_valid_fraction_per_group,
        any_value(slots.mixed_weight_version_per_group) AS mixed_weight_version_per_group,
        any_value(slots.row_policy) AS row_policy,
        max(events.attempt) FILTER (events.event_type = 'rollout_registered') AS registered_attempt,
        max(events.attempt) FILTER (events.ends) AS ended_attempt,
        arg_min(
            {
                'event_type': events.event_type,
                'reason': events.reason,
                'reward': events.reward,
                'terminal_call_id': events.terminal_call_id,
                'terminal_selection': events.terminal_selection,
                'event_order': events.event_order
            },
            row(-events.attempt, events.event_order)
        ) FILTER (events.ends) AS last_end,
        arg_min(
            { 'attempt': events.attempt, 'terminal_call_id': events.terminal_call_id },
            row(-events.attempt, events.terminal_call_id IS NULL, events.event_order)
        ) FILTER (events.event_type = 'rollout_frozen') AS freezing,
        arg_min(
            {
                'attempt': events.attempt,
                'call_id': events.call_id,
                'reason': CASE events.event_type
                    WHEN 'call_failed' THEN coalesce(events.reason, 'capture_failed')
                    ELSE json_text(events.detail, '$.poison')
                END,
                'event_order': events.event_order
            },
            row(-events.attempt, events.event_order)
        ) FILTER (events.poisons) AS poisoning,
        list({
            'attempt': events.attempt,
            'call_id': events.call_id,
            'parent_call_id': events.parent_call_id
        }) FILTER (events.event_type = 'call_overflowed') AS overflows
    FROM slots
    LEFT JOIN events
        ON
            slots.group_id = events.group_id
            AND slots.rollout_id = events.rollout_id
            AND (slots.closing_order IS NULL OR slots.closing_order >= events.event_order)
    GROUP BY slots.group_id, slots.rollout_id
),

chosen AS (
    SELECT
        *,
        coalesce(registered_attempt, ended_attempt, 0) AS attempt,
        CASE WHEN ended_attempt = coalesce(registered_attempt, ended_attempt) THEN last_end END AS ending_event
    FROM folded
)

SELECT
    group_id,
    rollout_id,
    rollout_index,
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
    attempt,
    overflows,
    registered_attempt IS NOT NULL AS registered,
    coalesce(freezing.attempt = attempt, FALSE) AS frozen,
    ending_event.event_type AS ending,
    ending_event.event_order AS end_order,
    ending_event.reason AS end_reason,
    ending_event.reward AS reward,
    ending_event.terminal_selection AS terminal_selection,
    coalesce(
        ending_event.terminal_call_id,
        CASE WHEN freezing.attempt = attempt THEN freezing.terminal_call_id END
    ) AS declared_call_id,
    CASE
        WHEN
            poisoning.attempt = attempt
            AND (ending_event IS NULL OR poisoning.event_order <= ending_event.event_order)
            THEN poisoning.reason
    END AS poison,
    poisoning.call_id AS poison_call_id
FROM chosen;
