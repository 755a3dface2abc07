-- what: every place of every group with the attempt that counts, the highest registered: how it ended, what poisons
--   it, its overflowed calls. What comes after the group was published or dropped changes nothing
-- grain: rollout
-- reads: slots, lineage, group_of, json_text
CREATE OR REPLACE VIEW attempts AS
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
        event_type IN (
            'rollout_registered', 'call_failed', 'call_overflowed', 'rollout_frozen', 'rollout_sealed', 'rollout_failed'
        )
        OR (event_type = 'call_committed' AND detail LIKE '%"poison"%')
),

folded AS (
    SELECT
        slots.group_id,
        slots.rollout_id,
        events.attempt,
        any_value(slots.rollout_index) AS rollout_index,
        any_value(slots.n) AS n,
        any_value(slots.purpose) AS purpose,
        any_value(slots.closed_by) AS closed_by,
        any_value(slots.closing_order) AS closing_order,
        any_value(slots.dispatch_weight_version) AS dispatch_weight_version,
        any_value(slots.mixed_weight_version) AS mixed_weight_version,
        any_value(slots.min_delivered_fraction) AS min_delivered_fraction,
        any_value(slots.min_valid_fraction_per_group) AS min_valid_fraction_per_group,
        coalesce(bool_or(events.event_type = 'rollout_registered'), FALSE) AS registered,
        coalesce(bool_or(events.event_type = 'rollout_frozen'), FALSE) AS frozen,
        min(events.event_order) FILTER (events.ends) AS end_order,
        arg_min(events.event_type, events.event_order) FILTER (events.ends) AS ending,
        arg_min_null(events.reason, events.event_order) FILTER (events.ends) AS end_reason,
        arg_min_null(events.reward, events.event_order) FILTER (events.ends) AS reward,
        arg_min_null(events.terminal_selection, events.event_order) FILTER (events.ends) AS terminal_selection,
        coalesce(
            arg_min_null(events.terminal_call_id, events.event_order) FILTER (events.ends),
            arg_min(events.terminal_call_id, events.event_order) FILTER (events.event_type = 'rollout_frozen')
        ) AS declared_call_id,
        min(events.event_order) FILTER (events.poisons) AS poison_order,
        arg_min(
            CASE events.event_type
                WHEN 'call_failed' THEN coalesce(events.reason, 'capture_failed')
                ELSE json_text(events.detail, '$.poison')
            END,
            events.event_order
        ) FILTER (events.poisons) AS poison,
        arg_min(events.call_id, events.event_order) FILTER (events.poisons) AS poison_call_id,
        list({ 'call_id': events.call_id, 'parent_call_id': events.parent_call_id })
        FILTER (events.event_type = 'call_overflowed') AS overflows
    FROM slots
    LEFT JOIN events
        ON
            slots.group_id = events.group_id
            AND slots.rollout_id = events.rollout_id
            AND (slots.closing_order IS NULL OR slots.closing_order >= events.event_order)
    GROUP BY slots.group_id, slots.rollout_id, events.attempt
)

SELECT
    * EXCLUDE (attempt, poison, poison_order),
    coalesce(attempt, 0) AS attempt,
    CASE WHEN end_order IS NULL OR poison_order <= end_order THEN poison END AS poison
FROM folded
QUALIFY
    row_number() OVER (
        PARTITION BY group_id, rollout_id
        ORDER BY registered DESC, ending IS NOT NULL DESC, attempt DESC
    ) = 1;
