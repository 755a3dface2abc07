-- what: how many calls failed, by reason and by whether the agent got an answer all the same
-- grain: reason x answered
-- reads: lineage
CREATE OR REPLACE VIEW capture_failures WITH (DEFER_BINDING) AS
SELECT
    coalesce(reason, 'unknown') AS reason,
    coalesce(answered, FALSE) AS answered,
    count(*) AS calls
FROM lineage
WHERE event_type = 'call_failed' AND reason IS DISTINCT FROM 'answer_undelivered'
GROUP BY ALL;
