-- what: calls that lineage commits more than once, and rows that a published file holds more than once
-- grain: finding
-- reads: committed_calls, rows, group_records
CREATE OR REPLACE VIEW audit_duplicates WITH (DEFER_BINDING) AS
SELECT
    'duplicate_commit' AS kind,
    'fault' AS severity,
    group_id,
    rollout_id,
    call_id,
    NULL::VARCHAR AS place,
    concat('attempt ', attempt, ': ', count(*), ' events') AS detail
FROM committed_calls
GROUP BY group_id, rollout_id, attempt, call_id
HAVING count(*) > 1
UNION ALL BY NAME
SELECT
    'duplicate_row' AS kind,
    'fault' AS severity,
    written.group_id,
    written.rollout_id,
    NULL::VARCHAR AS call_id,
    concat('rows/', written.segment) AS place,
    concat('sample ', written.sample_id, ': ', count(*), ' rows') AS detail
FROM rows AS written
INNER JOIN group_records AS groups
    ON
        written.group_id = groups.group_id
        AND written.segment = groups.segment
WHERE groups.closed_by = 'group_published'
GROUP BY written.group_id, written.rollout_id, written.sample_id, written.segment_index, written.segment
HAVING count(*) > 1;
