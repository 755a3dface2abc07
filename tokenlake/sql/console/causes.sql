-- what: why calls are roots, and why calls failed
-- grain: kind x cause
-- reads: roots_by_cause, capture_failures
SELECT
    'root' AS kind,
    cause,
    roots AS calls
FROM roots_by_cause
UNION ALL
SELECT
    'failure' AS kind,
    reason AS cause,
    sum(calls)::BIGINT AS calls
FROM capture_failures
GROUP BY reason
ORDER BY ALL;
