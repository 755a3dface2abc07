-- what: the pad id of the model registered last
-- grain: one row, or none
-- reads: lineage
SELECT detail ->> '$.pad_id' AS pad_id
FROM lineage
WHERE event_type = 'model_registered'
ORDER BY lineage.at DESC, event_writer DESC, event_seq DESC
LIMIT 1;
