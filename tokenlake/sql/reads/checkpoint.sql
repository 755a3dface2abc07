-- what: whether the consumer ?1 has consumed something under the checkpoint ?2 and not gone back behind it
-- grain: one row
-- reads: claims
SELECT count(*) > 0 AS reached
FROM claims
WHERE consumer = ?1 AND state = 'consumed' AND "checkpoint" = ?2;
