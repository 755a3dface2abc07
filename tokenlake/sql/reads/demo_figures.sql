-- what: the figures the demo prints
-- grain: one row
-- reads: groups, ready_rows, calls, lineage, audit_findings
WITH by_reason AS (
    SELECT
        reason,
        count(*) AS placeholders
    FROM ready_rows
    WHERE reason IS NOT NULL
    GROUP BY reason
),

by_cause AS (
    SELECT
        reason,
        count(*) AS roots
    FROM calls
    WHERE status = 'committed' AND mode = 'text'
    GROUP BY reason
),

by_version AS (
    SELECT
        concat(
            weight_version_min, CASE WHEN weight_version_max <> weight_version_min THEN '..' || weight_version_max END
        ) AS versions,
        count(*) AS in_rows
    FROM ready_rows
    WHERE sample_mask = 1
    GROUP BY versions
),

signals AS (
    SELECT
        group_id,
        count(DISTINCT reward) > 1 AS mixed
    FROM ready_rows
    WHERE sample_mask = 1
    GROUP BY group_id
)

SELECT
    (
        SELECT count(*) FROM groups
        WHERE state = 'published'
    ) AS groups,
    (SELECT count(*) FROM ready_rows) AS rows,
    (
        SELECT count(*) FROM ready_rows
        WHERE sample_mask = 1
    ) AS valid_rows,
    (SELECT json_group_object(reason, placeholders) FROM by_reason) AS placeholders,
    (SELECT json_group_object(reason, roots) FROM by_cause) AS roots,
    (
        SELECT count(*) FROM calls
        WHERE status = 'committed'
    ) AS calls,
    (
        SELECT count(*) FROM calls
        WHERE status = 'committed' AND mode = 'token_in'
    ) AS token_in,
    (
        SELECT coalesce(avg(reward), 0) FROM ready_rows
        WHERE sample_mask = 1
    ) AS mean_reward,
    (
        SELECT count(*) FROM signals
        WHERE mixed
    ) AS mixed_groups,
    (SELECT json_group_object(versions, in_rows) FROM by_version) AS version_spread,
    (
        SELECT coalesce(sum(sampled_tokens), 0)::BIGINT FROM calls
        WHERE status = 'committed'
    ) AS sampled_tokens,
    (
        SELECT coalesce(sum(sampled_tokens), 0)::BIGINT FROM ready_rows
        WHERE sample_mask = 1
    ) AS trained_tokens,
    (
        SELECT coalesce(sum(byte_length), 0)::BIGINT FROM lineage
        WHERE event_type = 'call_committed'
    ) AS staged_bytes,
    (
        SELECT count(*) FROM audit_findings
        WHERE severity = 'fault'
    ) AS faults;
