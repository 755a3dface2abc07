-- what: committed calls that fail a check, on a chain or off it, of any attempt. Records that retention removed are
--   none
-- grain: finding
-- reads: call_checks
CREATE OR REPLACE VIEW audit_calls WITH (DEFER_BINDING) AS
SELECT
    coalesce(checks.reason, checks.check_name) AS kind,
    checks.severity,
    checks.group_id,
    checks.rollout_id,
    checks.call_id,
    checks.place,
    concat('attempt ', checks.attempt, coalesce(': ' || checks.detail, '')) AS detail
FROM call_checks AS checks
WHERE NOT checks.ok AND checks.check_name <> 'not_retired';
