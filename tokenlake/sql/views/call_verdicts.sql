-- what: whether a committed call is sound, and the first fault if not. Notices do not count
-- grain: call
-- reads: checked_calls
CREATE OR REPLACE VIEW call_verdicts WITH (DEFER_BINDING) AS
SELECT
    group_id,
    rollout_id,
    attempt,
    call_id,
    reason IS NULL AS ok,
    reason
FROM checked_calls;
