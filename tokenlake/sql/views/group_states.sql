-- what: where every group stands, without reading a token. `due`: all its rollouts have ended, nothing closed it yet
-- grain: group
-- reads: group_records, attempts
CREATE OR REPLACE VIEW group_states WITH (DEFER_BINDING) AS
WITH counted AS (
    SELECT
        group_id,
        count(*) FILTER (ending IS NOT NULL) AS ended,
        count(*) FILTER (registered) AS registered
    FROM attempts
    GROUP BY group_id
)

SELECT
    groups.group_id,
    groups.n,
    CASE
        WHEN groups.closed_by = 'group_published' THEN 'published'
        WHEN groups.closed_by = 'group_dropped' THEN 'dropped'
        WHEN counted.ended = groups.n THEN 'due'
        ELSE 'open'
    END AS state,
    counted.ended,
    counted.registered,
    groups.purpose,
    groups.dispatch_weight_version,
    groups.registered_at,
    groups.deadline_at,
    groups.closed_at,
    groups.cutoff_at,
    groups.segment,
    groups.published_min_wv,
    groups.published_max_wv,
    groups.min_valid_fraction_per_group,
    groups.mixed_weight_version_per_group,
    groups.drop_reason,
    groups.meta
FROM group_records AS groups
INNER JOIN counted ON groups.group_id = counted.group_id;
