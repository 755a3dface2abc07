-- what: every place of every group: state, attempt, terminal, verdict and one reason. A group that was published or
--   dropped is seen as it was then
-- grain: rollout
-- reads: judged_rollouts
CREATE OR REPLACE VIEW rollouts AS
SELECT
    rollout_id,
    group_id,
    rollout_index,
    attempt,
    state,
    terminal_call_id,
    terminal_selection,
    reward,
    verdict,
    reason,
    CASE
        WHEN reason IS NULL THEN NULL
        WHEN ending.reason IS NOT NULL THEN ending.reason
        WHEN poison IS NOT NULL THEN concat('call ', poison.call_id, coalesce(': ' || poison.detail, ''))
        WHEN fault IS NOT NULL THEN concat('call ', fault.call_id, coalesce(': ' || fault.detail, ''))
    END AS detail,
    poison IS NOT NULL AS poisoned,
    calls,
    attempt_sampled_tokens AS sampled_tokens,
    turns,
    weight_version_min,
    weight_version_max,
    truncated,
    n,
    purpose
FROM judged_rollouts;
