-- what: groups that the consumer ?1 claimed and whose lease has ended at ?2 (microseconds since the epoch)
-- grain: group
-- reads: claims
SELECT
    consumer,
    claim_id,
    group_id
FROM claims
WHERE consumer = ?1 AND state = 'claimed' AND epoch_us(deadline_at) <= ?2
ORDER BY change_order;
