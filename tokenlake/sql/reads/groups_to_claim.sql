-- what: groups that the consumer ?1 has still to get, in the order of all consumers, and whether it may: judged by the
--   oldest version of a group's valid rows against the version ?2 of the consumer (NULL: not judged) and the most
--   versions ?3 that it may lie behind (NULL: any)
-- grain: group
-- reads: claimable_groups, claims
SELECT
    ready.group_id,
    ready.n,
    ready.group_min_wv,
    ready.group_max_wv,
    CASE
        WHEN ready.group_min_wv > ?2::BIGINT THEN 'future'
        WHEN ?3::BIGINT IS NOT NULL AND ready.group_min_wv IS NULL THEN 'unknown_version'
        WHEN ready.group_min_wv < ?2::BIGINT - ?3::BIGINT THEN 'stale'
        ELSE 'fresh'
    END AS age
FROM claimable_groups AS ready
LEFT JOIN claims ON ready.group_id = claims.group_id AND claims.consumer = ?1
WHERE coalesce(claims.state, 'free') = 'free'
ORDER BY ready.claim_order;
