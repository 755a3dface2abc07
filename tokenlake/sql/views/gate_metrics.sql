-- what: the service's figures as far as lineage knows them, over the whole lake and not since a start; `labels` is NULL
--   where a figure has none
-- grain: name x labels
-- reads: lineage, attempts, group_records
CREATE OR REPLACE VIEW gate_metrics WITH (DEFER_BINDING) AS
WITH committed AS (
    SELECT
        coalesce(mode, 'text') AS mode,
        coalesce(dialect, 'import') AS dialect,
        coalesce(reason, 'no_history') AS cause,
        byte_length,
        parent_call_id IS NULL AS is_root
    FROM lineage
    WHERE event_type = 'call_committed'
),

closed AS (
    SELECT
        published_max_wv - published_min_wv AS spread,
        closing_order
    FROM group_records
    WHERE closed_by = 'group_published'
),

figures AS (
    SELECT
        'gate_calls_total' AS name,
        { 'mode': mode, 'dialect': dialect }::JSON AS labels,
        count(*)::DOUBLE AS value
    FROM committed
    GROUP BY mode, dialect
    UNION ALL
    SELECT
        'gate_roots_total' AS name,
        { 'cause': cause }::JSON AS labels,
        count(*)::DOUBLE AS value
    FROM committed
    WHERE is_root
    GROUP BY cause
    UNION ALL
    SELECT
        'gate_token_in_rate' AS name,
        NULL AS labels,
        coalesce(avg((mode = 'token_in')::INTEGER), 0.0) AS value
    FROM committed
    UNION ALL
    SELECT
        'gate_capture_failures_total' AS name,
        { 'reason': reason }::JSON AS labels,
        count(*)::DOUBLE AS value
    FROM lineage
    WHERE event_type = 'call_failed' AND reason IS DISTINCT FROM 'answer_undelivered'
    GROUP BY reason
    UNION ALL
    SELECT
        'gate_undelivered_total' AS name,
        NULL AS labels,
        count(*)::DOUBLE AS value
    FROM lineage
    WHERE event_type = 'call_failed' AND reason = 'answer_undelivered' AND detail IS NULL
    UNION ALL
    SELECT
        'gate_open_rollouts' AS name,
        NULL AS labels,
        count(*)::DOUBLE AS value
    FROM attempts
    WHERE registered AND closed_by IS NULL AND ending IS NULL AND NOT frozen
    UNION ALL
    SELECT
        'stage_bytes_total' AS name,
        NULL AS labels,
        coalesce(sum(byte_length), 0)::DOUBLE AS value
    FROM committed
    UNION ALL
    SELECT
        'rollouts_expired_total' AS name,
        NULL AS labels,
        count(*)::DOUBLE AS value
    FROM lineage
    WHERE event_type = 'rollout_failed' AND reason = 'never_sealed'
    UNION ALL
    SELECT
        'group_wv_spread' AS name,
        NULL AS labels,
        arg_max(spread, closing_order)::DOUBLE AS value
    FROM closed
)

SELECT
    name,
    labels,
    value
FROM figures
WHERE value IS NOT NULL;
