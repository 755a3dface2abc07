-- what: calls for which more than one record was staged, and how many different records these are
-- grain: call
-- reads: deltas
CREATE OR REPLACE VIEW delta_copies AS
SELECT
    rollout_id,
    attempt,
    call_id,
    count(*) AS copies,
    count(DISTINCT digest) AS records
FROM deltas
GROUP BY rollout_id, attempt, call_id
HAVING count(*) > 1;
