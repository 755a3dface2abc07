-- what: the policies in force
-- grain: one row, or none before any was set
-- reads: lineage
SELECT detail
FROM lineage
WHERE event_type = 'policy_set'
ORDER BY lineage.at DESC, event_writer DESC, event_seq DESC
LIMIT 1;
