-- what: how many small batches of deltas no compaction has taken yet, and whether retention retired any that is there
-- grain: one row
-- reads: tl_places, retirements
SELECT
    count(*) FILTER (places.writer <> ?1 AND places.byte_length < ?2) AS small,
    coalesce(
        bool_or(
            coalesce(retirements.whole OR list_contains(retirements.rollouts, places.rollout_id), FALSE)
        ), FALSE
    ) AS retired
FROM tl_places AS places
LEFT JOIN retirements ON places.group_id = retirements.group_id;
