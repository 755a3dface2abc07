-- what: the groups of a claim, by its id ?1 or by the idempotency digest ?2 with which the consumer ?3 asked for it, in
--   the order they were handed out, and what became of each: `claimed`, `consumed` (under this or, after it was given
--   back, another claim), or `released`
-- grain: group
-- reads: lineage, claims, claimable_groups
SELECT
    handed.claim_id,
    handed.consumer,
    handed.group_id,
    epoch_us(handed.deadline_at) AS deadline_us,
    CASE WHEN claims.claim_id = handed.claim_id AND claims.state <> 'free' THEN claims.state ELSE 'released' END
        AS state,
    claims.checkpoint AS "checkpoint",
    ready.n,
    ready.group_min_wv,
    ready.group_max_wv
FROM lineage AS handed
INNER JOIN claims ON handed.consumer = claims.consumer AND handed.group_id = claims.group_id
INNER JOIN claimable_groups AS ready ON handed.group_id = ready.group_id
WHERE
    handed.event_type = 'rows_claimed'
    AND (handed.claim_id = ?1 OR (handed.idempotency_digest = ?2 AND handed.consumer = ?3))
ORDER BY handed.at, handed.event_writer, handed.event_seq;
