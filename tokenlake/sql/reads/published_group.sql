-- what: what publishing one group came to
-- grain: one row, or none while it is not published
-- reads: ready_rows
SELECT
    coalesce(sum(sample_mask), 0)::BIGINT AS valid,
    any_value(group_min_wv) AS group_min_wv,
    any_value(group_max_wv) AS group_max_wv
FROM ready_rows
WHERE group_id = ?1
HAVING count(*) > 0;
