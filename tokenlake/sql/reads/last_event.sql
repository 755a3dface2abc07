-- what: the number of the last event that is known here; -1 where there is none
-- grain: lake
-- reads: lineage
SELECT coalesce(max(event_seq), -1) AS event_seq FROM lineage;
