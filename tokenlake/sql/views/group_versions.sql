-- what: the weight versions of every group: over the chains of its valid rows, from the views while it is open and as
--   published afterwards. A group without a valid row takes its dispatch version; NULL means unknown
-- grain: group
-- reads: judged_rollouts, group_records, rows
CREATE OR REPLACE VIEW group_versions WITH (DEFER_BINDING) AS
WITH judged AS (
    SELECT
        group_id,
        count(*) FILTER (verdict = 'valid') AS valid,
        count(*) FILTER (verdict = 'placeholder') AS placeholders,
        CASE
            WHEN count(*) FILTER (verdict = 'valid') = 0 THEN any_value(dispatch_weight_version)
            WHEN count(*) FILTER (verdict = 'valid' AND oldest_version IS NULL) = 0
                THEN min(oldest_version) FILTER (verdict = 'valid')
        END AS group_min_wv,
        CASE
            WHEN count(*) FILTER (verdict = 'valid') = 0 THEN any_value(dispatch_weight_version)
            WHEN count(*) FILTER (verdict = 'valid' AND newest_version IS NULL) = 0
                THEN max(newest_version) FILTER (verdict = 'valid')
        END AS group_max_wv
    FROM judged_rollouts
    WHERE closed_by IS NULL
    GROUP BY group_id
),

closed AS (
    SELECT
        groups.group_id,
        count(DISTINCT written.rollout_id) FILTER (written.sample_mask = 1) AS valid,
        count(*) FILTER (written.sample_mask = 0) AS placeholders,
        any_value(groups.published_min_wv) AS group_min_wv,
        any_value(groups.published_max_wv) AS group_max_wv
    FROM group_records AS groups
    LEFT JOIN rows AS written
        ON
            groups.group_id = written.group_id
            AND groups.segment = written.segment
            AND groups.closed_by = 'group_published'
    WHERE groups.closed_by IS NOT NULL
    GROUP BY groups.group_id
),

every_group AS (
    SELECT * FROM judged
    UNION ALL BY NAME
    SELECT * FROM closed
)

SELECT
    *,
    group_max_wv - group_min_wv AS spread,
    coalesce(group_min_wv <> group_max_wv, FALSE) AS mixed
FROM every_group;
