-- what: ready rows of one group, or of all for NULL
-- grain: row
-- reads: ready_rows
SELECT *
FROM ready_rows
WHERE ?1 IS NULL OR group_id = ?1
ORDER BY group_id, length(sample_id), sample_id, segment_index;
