-- what: every call of one rollout, of all attempts, with its verdict and its place in the terminal chain
-- grain: call
-- reads: calls, call_verdicts, chains
SELECT
    calls.*,
    chains.position,
    call_verdicts.ok,
    call_verdicts.reason AS fault
FROM calls
LEFT JOIN call_verdicts
    ON
        calls.rollout_id = call_verdicts.rollout_id
        AND calls.attempt = call_verdicts.attempt
        AND calls.call_id = call_verdicts.call_id
LEFT JOIN chains
    ON
        calls.rollout_id = chains.rollout_id
        AND calls.attempt = chains.attempt
        AND calls.call_id = chains.call_id
WHERE calls.rollout_id = ?1
ORDER BY calls.attempt, calls.call_id;
