-- what: records that were staged and never committed: a crash between the two leaves them, and a rollout in flight
--   has one for a moment. No row holds them. What has no token is a mark of a capture and no lost record
-- grain: finding
-- reads: deltas, committed_calls, group_of
CREATE OR REPLACE VIEW audit_orphans WITH (DEFER_BINDING) AS
SELECT
    'uncommitted_record' AS kind,
    'notice' AS severity,
    group_of(deltas.rollout_id) AS group_id,
    deltas.rollout_id,
    deltas.call_id,
    NULL::VARCHAR AS place,
    concat('attempt ', deltas.attempt) AS detail
FROM deltas
LEFT JOIN committed_calls AS calls
    ON
        deltas.rollout_id = calls.rollout_id
        AND deltas.attempt = calls.attempt
        AND deltas.call_id = calls.call_id
WHERE calls.call_id IS NULL AND deltas.cum_len > 0;
