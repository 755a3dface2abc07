-- what: keeps what the records of some groups say, `?1` being one of them; what belongs to no group was said once
--   already
-- grain: finding
-- reads: audit_records, tl_found
INSERT INTO tl_found
SELECT
    coalesce(found.group_id, ?1) AS audited,
    found.kind,
    found.severity,
    found.group_id,
    found.rollout_id,
    found.call_id,
    found.place,
    found.detail
FROM audit_records AS found
LEFT JOIN tl_found AS said
    ON
        said.audited = ''
        AND found.kind = said.kind
        AND found.group_id IS NOT DISTINCT FROM said.group_id
        AND found.call_id IS NOT DISTINCT FROM said.call_id
        AND found.place IS NOT DISTINCT FROM said.place
        AND found.detail IS NOT DISTINCT FROM said.detail
WHERE said.audited IS NULL;
