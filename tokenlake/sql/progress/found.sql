-- what: every finding of an audit, worst first
-- grain: finding
-- reads: tl_found
SELECT * EXCLUDE (audited)
FROM tl_found
ORDER BY severity, kind, group_id, rollout_id, call_id, place, detail;
