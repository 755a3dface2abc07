-- what: what publishing the rows `due_rows` comes to, for each of the groups ?1
-- grain: group
-- reads: due_rows, group_records
WITH reasons AS (
    SELECT
        group_id,
        reason,
        count(*) AS placeholders
    FROM due_rows
    WHERE reason IS NOT NULL
    GROUP BY group_id, reason
),

by_reason AS (
    SELECT
        group_id,
        json_group_object(reason, placeholders) AS reasons
    FROM reasons
    GROUP BY group_id
)

SELECT
    group_records.group_id,
    group_records.n,
    count(DISTINCT due_rows.rollout_id) AS published,
    count(due_rows.rollout_id) AS published_rows,
    count(DISTINCT due_rows.rollout_id) FILTER (due_rows.sample_mask = 1) AS valid,
    any_value(due_rows.group_min_wv) AS group_min_wv,
    any_value(due_rows.group_max_wv) AS group_max_wv,
    coalesce(any_value(by_reason.reasons), '{}') AS reasons
FROM group_records
LEFT JOIN due_rows ON group_records.group_id = due_rows.group_id
LEFT JOIN by_reason ON group_records.group_id = by_reason.group_id
WHERE list_contains(?1::VARCHAR[], group_records.group_id)
GROUP BY group_records.group_id, group_records.n
ORDER BY group_records.group_id;
