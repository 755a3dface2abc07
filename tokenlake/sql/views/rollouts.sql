-- what: every place of every group: state, attempt, terminal, verdict and one reason. A group that was published or
--   dropped is seen as it was then
-- grain: rollout
-- reads: judged_rollouts
CREATE OR REPLACE VIEW rollouts WITH (DEFER_BINDING) AS
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
        WHEN end_reason IS NOT NULL THEN end_reason
        WHEN poison IS NOT NULL THEN concat('call ', poison_call_id, ': ', poison)
        WHEN fault IS NOT NULL THEN concat('call ', fault.call_id, coalesce(': ' || fault.detail, ''))
    END AS detail,
    poison IS NOT NULL AS poisoned,
    calls,
    attempt_sampled_tokens AS sampled_tokens,
    CASE WHEN terminal_call_id IS NOT NULL THEN turns END AS turns,
    CASE WHEN terminal_call_id IS NOT NULL THEN weight_version_min END AS weight_version_min,
    CASE WHEN terminal_call_id IS NOT NULL THEN weight_version_max END AS weight_version_max,
    truncated,
    n,
    purpose
FROM judged_rollouts;
