-- what: how many committed calls are roots, by the cause that made them one
-- grain: cause
-- reads: committed_calls
CREATE OR REPLACE VIEW roots_by_cause WITH (DEFER_BINDING) AS
SELECT
    coalesce(reason, 'no_history') AS cause,
    count(*) AS roots
FROM committed_calls
WHERE parent_call_id IS NULL
GROUP BY ALL;
