-- what: every committed call with the outcome of every check, those that need all its records included; no tokens
-- grain: call
-- reads: verified_calls
CREATE OR REPLACE VIEW checked_calls WITH (DEFER_BINDING) AS
WITH counted AS (
    SELECT
        *,
        count(*) OVER (PARTITION BY group_id, rollout_id, attempt, call_id) AS records,
        bool_or(other_record) OVER (PARTITION BY group_id, rollout_id, attempt, call_id) AS conflicting
    FROM verified_calls
    QUALIFY
        row_number() OVER (
            PARTITION BY group_id, rollout_id, attempt, call_id
            ORDER BY other_record, reason NULLS LAST
        ) = 1
)

SELECT
    * EXCLUDE (token_ids, token_mask, logprobs, reason, records, conflicting),
    records = 1 OR NOT conflicting AS ok_single_record,
    records = 1 OR conflicting AS ok_single_copy,
    CASE WHEN records > 1 AND conflicting THEN 'duplicate_record' ELSE reason END AS reason
FROM counted;
