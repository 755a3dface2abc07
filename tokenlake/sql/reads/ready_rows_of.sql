-- what: the ready rows of some groups, a group's rows together in the order of its rollouts
-- grain: row
-- reads: ready_rows
SELECT ready_rows.*
FROM ready_rows
WHERE group_id IN (SELECT unnest(?1::VARCHAR[]))
ORDER BY list_position(?1::VARCHAR[], group_id), length(sample_id), sample_id, segment_index;
