-- what: how much there is, from lineage alone
-- grain: one row
-- reads: group_states, lineage
WITH stated AS (
    SELECT
        count(*) AS groups,
        count(*) FILTER (state = 'open') AS open,
        count(*) FILTER (state = 'due') AS due,
        count(*) FILTER (state = 'published') AS published,
        count(*) FILTER (state = 'dropped') AS dropped,
        coalesce(sum(n), 0)::BIGINT AS rollouts
    FROM group_states
),

logged AS (
    SELECT
        count(*) FILTER (event_type = 'call_committed') AS calls,
        count(*) FILTER (event_type = 'call_failed') AS failed_calls,
        max(weight_version) FILTER (event_type = 'weight_version_published') AS weight_version
    FROM lineage
)

SELECT
    stated.*,
    logged.*
FROM stated
CROSS JOIN logged;
