-- what: what is wrong with the calls of one rollout
-- grain: call x check
-- reads: call_checks
SELECT
    attempt,
    call_id,
    check_name,
    severity,
    reason,
    place,
    detail
FROM call_checks
WHERE rollout_id = ?1 AND NOT ok
ORDER BY ALL;
