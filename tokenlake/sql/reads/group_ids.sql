-- what: ids of registered groups after ?1, at most ?2
-- grain: group
-- reads: lineage
SELECT DISTINCT group_id
FROM lineage
WHERE event_type = 'group_registered' AND group_id > ?1
ORDER BY group_id
LIMIT ?2;
