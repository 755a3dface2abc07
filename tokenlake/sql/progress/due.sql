-- what: the groups that an audit has not looked at as they are now, the bytes of their deltas and rows, and how many
--   such groups there are; with `?1` only those of which something was found
-- grain: group
-- reads: tl_events, tl_places, tl_rows, tl_audited, tl_found
WITH sizes AS (
    SELECT
        tl_group AS group_id,
        1 AS events,
        0 AS calls,
        0 AS published,
        0 AS size
    FROM tl_events
    WHERE tl_group IS NOT NULL
    UNION ALL
    SELECT
        group_id,
        0 AS events,
        1 AS calls,
        0 AS published,
        byte_length // (count(*) OVER (PARTITION BY writer, segment, byte_offset)) AS size
    FROM tl_places
    WHERE NOT shadowed
    UNION ALL
    SELECT
        group_id,
        0 AS events,
        0 AS calls,
        1 AS published,
        byte_length // (count(*) OVER (PARTITION BY segment, byte_offset)) AS size
    FROM tl_rows
),

found AS (
    SELECT
        group_id,
        sum(events)::BIGINT AS events,
        sum(calls)::BIGINT AS calls,
        sum(published)::BIGINT AS published,
        sum(size)::BIGINT AS size
    FROM sizes
    GROUP BY group_id
)

SELECT
    found.group_id,
    found.events,
    found.calls,
    found.published,
    found.size,
    count(*) OVER () AS due
FROM found
LEFT JOIN tl_audited
    ON
        found.group_id = tl_audited.group_id
        AND found.events = tl_audited.events
        AND found.calls = tl_audited.calls
        AND found.published = tl_audited.published
WHERE
    tl_audited.group_id IS NULL
    AND (NOT ?1 OR found.group_id IN (SELECT tl_found.audited FROM tl_found))
ORDER BY found.group_id;
