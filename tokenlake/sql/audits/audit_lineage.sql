-- what: events that are not what was appended (hash recomputed), and events that name a group, place or attempt
--   nobody registered, or a call that came after its rollout ended. Gaps and lost heads are in `lake_findings`
-- grain: finding
-- reads: lineage, group_records, attempts, group_of, index_of
CREATE OR REPLACE VIEW audit_lineage WITH (DEFER_BINDING) AS
WITH recomputed AS (
    SELECT
        lineage.*,
        coalesce(event_hash = tl_event_hash(lineage), FALSE) AS ok
    FROM lineage
),

registered AS (
    SELECT DISTINCT
        rollout_id,
        coalesce(attempt, 0) AS attempt
    FROM lineage
    WHERE event_type = 'rollout_registered'
),

placed AS (
    SELECT
        events.event_type,
        events.rollout_id,
        events.call_id,
        events.event_writer,
        events.event_seq,
        coalesce(events.group_id, group_of(events.rollout_id)) AS group_id,
        coalesce(events.attempt, 0) AS attempt,
        row(events.at, events.event_writer, events.event_seq) AS event_order
    FROM lineage AS events
    WHERE events.rollout_id IS NOT NULL AND events.event_type IN ('rollout_registered', 'call_committed')
)

SELECT
    'event_hash_mismatch' AS kind,
    'fault' AS severity,
    group_id,
    rollout_id,
    call_id,
    concat('lineage/', event_writer) AS place,
    concat('event ', event_seq) AS detail
FROM recomputed
WHERE NOT ok
UNION ALL BY NAME
SELECT
    CASE
        WHEN groups.group_id IS NULL THEN 'group_unregistered'
        WHEN coalesce(index_of(placed.rollout_id) >= groups.n, TRUE) THEN 'rollout_outside_group'
        WHEN registered.attempt IS NULL THEN 'attempt_unregistered'
        ELSE 'late_call'
    END AS kind,
    CASE
        WHEN
            groups.group_id IS NULL
            OR coalesce(index_of(placed.rollout_id) >= groups.n, TRUE)
            OR registered.attempt IS NULL
            THEN 'fault'
        ELSE 'notice'
    END AS severity,
    placed.group_id,
    placed.rollout_id,
    placed.call_id,
    concat('lineage/', placed.event_writer) AS place,
    concat('event ', placed.event_seq) AS detail
FROM placed
LEFT JOIN group_records AS groups ON placed.group_id = groups.group_id
LEFT JOIN registered
    ON
        placed.rollout_id = registered.rollout_id
        AND placed.attempt = registered.attempt
LEFT JOIN attempts
    ON
        placed.group_id = attempts.group_id
        AND placed.rollout_id = attempts.rollout_id
        AND placed.attempt = attempts.attempt
WHERE
    groups.group_id IS NULL
    OR coalesce(index_of(placed.rollout_id) >= groups.n, TRUE)
    OR registered.attempt IS NULL
    OR (
        placed.event_type = 'call_committed'
        AND coalesce(
            placed.event_order > attempts.end_order OR placed.event_order > groups.closing_order,
            FALSE
        )
    );
