-- what: groups that the consumer ?1 holds, and those that it consumed or was too late for after the last of the
--   checkpoint ?2 (NULL: all of them)
-- grain: group
-- reads: claims
SELECT
    consumer,
    claim_id,
    group_id
FROM claims
WHERE
    consumer = ?1
    AND (
        state = 'claimed'
        OR (
            state IN ('consumed', 'evicted')
            AND (
                ?2 IS NULL
                OR change_order > (
                    SELECT max(reached.change_order)
                    FROM claims AS reached
                    WHERE reached.consumer = ?1 AND reached.state = 'consumed' AND reached.checkpoint = ?2
                )
            )
        )
    )
ORDER BY change_order;
