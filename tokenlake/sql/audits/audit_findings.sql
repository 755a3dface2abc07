-- what: every finding of a lake, by kind; empty means healthy. A fault says that bytes or rows are not what they
--   claim, a notice is worth knowing
-- grain: finding
-- reads: audit_records, lake_findings
CREATE OR REPLACE VIEW audit_findings WITH (DEFER_BINDING) AS
SELECT * FROM audit_records
UNION ALL BY NAME
SELECT
    kind,
    'fault' AS severity,
    NULL::VARCHAR AS group_id,
    NULL::VARCHAR AS rollout_id,
    NULL::VARCHAR AS call_id,
    place,
    detail
FROM lake_findings;
