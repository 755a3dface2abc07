-- what: the events that make up one rollout, in the order they were decided
-- grain: event
-- reads: lineage
SELECT *
FROM lineage
WHERE
    rollout_id = ?1
    AND event_type IN ('rollout_registered', 'call_committed', 'rollout_sealed', 'rollout_failed')
ORDER BY lineage.at, event_writer, event_seq;
