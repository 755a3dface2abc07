-- what: keeps what is wrong with the files themselves
-- grain: finding
-- reads: lake_findings
INSERT INTO tl_found
SELECT
    '' AS audited,
    kind,
    'fault' AS severity,
    NULL AS group_id,
    NULL AS rollout_id,
    NULL AS call_id,
    place,
    detail
FROM lake_findings;
