-- what: closed groups whose deltas retention may remove: old enough, below a weight version, consumed. A NULL
--   condition holds for every group; a group that is retired already is not here
-- grain: group
-- reads: group_records, retirements, lineage
WITH consumed AS (
    SELECT
        group_id,
        arg_max(event_type, row(lineage.at, event_writer, event_seq)) AS last_event
    FROM lineage
    WHERE event_type IN ('rows_claimed', 'rows_consumed', 'rows_released') AND group_id IS NOT NULL
    GROUP BY group_id, consumer
)

SELECT closed.group_id
FROM group_records AS closed
LEFT JOIN retirements ON closed.group_id = retirements.group_id
LEFT JOIN consumed
    ON
        closed.group_id = consumed.group_id
        AND consumed.last_event = 'rows_consumed'
WHERE
    closed.closed_by IS NOT NULL
    AND coalesce(retirements.whole, FALSE) = FALSE
    AND coalesce(closed.closed_at <= make_timestamptz(?1), ?1 IS NULL)
    AND coalesce(closed.published_max_wv < ?2, ?2 IS NULL)
    AND (consumed.group_id IS NOT NULL OR ?3 = FALSE)
GROUP BY closed.group_id
ORDER BY closed.group_id;
