-- what: what publishing some groups came to
-- grain: group, of those that are published
-- reads: ready_rows
SELECT
    group_id,
    count(DISTINCT rollout_id) FILTER (sample_mask = 1) AS valid,
    any_value(group_min_wv) AS group_min_wv,
    any_value(group_max_wv) AS group_max_wv
FROM ready_rows
WHERE group_id IN (SELECT unnest(?1::VARCHAR[]))
GROUP BY group_id;
