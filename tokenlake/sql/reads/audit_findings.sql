-- what: every finding of every audit, worst first
-- grain: finding
-- reads: audit_findings
SELECT *
FROM audit_findings
ORDER BY severity, kind, group_id, rollout_id, call_id;
