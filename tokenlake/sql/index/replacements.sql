-- what: the compacted segments that lineage names
-- grain: segment
-- reads: tl_events
SELECT DISTINCT segment
FROM tl_events
WHERE event_type = 'segment_replaced' AND writer = ?1 AND segment IS NOT NULL;
