-- what: published groups that are not whole, rows of groups that nobody registered, rows that the records no longer
--   give (unless retention removed those), and groups whose chains mix temperatures or kinds of logprobs
-- grain: finding
-- reads: group_records, rows, candidate_rows, retirements, chains, committed_calls
CREATE OR REPLACE VIEW audit_groups WITH (DEFER_BINDING) AS
WITH written AS (
    SELECT
        groups.n,
        groups.group_id,
        groups.segment,
        rows.rollout_id,
        rows.sample_mask,
        rows.segment_index,
        rows.segment_count,
        rows.reason,
        rows.reward,
        rows.terminal_call_id,
        rows.attempt,
        rows.weight_version_min,
        rows.weight_version_max,
        rows.group_min_wv,
        rows.group_max_wv,
        rows.temperature,
        rows.logprob_mode,
        rows.truncated,
        rows.turns,
        rows.sampled_tokens,
        rows.dropped_sampled_tokens,
        rows.call_ids,
        rows.prompt_ids_for_adv,
        rows.input_ids,
        rows.token_mask,
        rows.logprobs
    FROM group_records AS groups
    LEFT JOIN rows
        ON
            groups.group_id = rows.group_id
            AND groups.segment = rows.segment
    WHERE groups.closed_by = 'group_published'
),

mixed AS (
    SELECT
        chains.group_id,
        count(DISTINCT calls.temperature) > 1 AS temperatures,
        count(DISTINCT calls.logprob_mode) > 1 AS logprob_modes
    FROM chains
    INNER JOIN committed_calls AS calls
        ON
            chains.group_id = calls.group_id
            AND chains.rollout_id = calls.rollout_id
            AND chains.attempt = calls.attempt
            AND chains.call_id = calls.call_id
    GROUP BY chains.group_id
)

SELECT
    'group_incomplete' AS kind,
    'fault' AS severity,
    group_id,
    NULL::VARCHAR AS rollout_id,
    NULL::VARCHAR AS call_id,
    concat('rows/', any_value(segment)) AS place,
    concat(count(DISTINCT rollout_id), ' of ', n, ' rollouts have a readable row') AS detail
FROM written
GROUP BY group_id, n
HAVING
    count(DISTINCT rollout_id) <> n
    OR count(DISTINCT row(rollout_id, segment_index)) <> sum(segment_count) FILTER (segment_index = 0)
UNION ALL BY NAME
SELECT
    'group_unregistered' AS kind,
    'fault' AS severity,
    stray.group_id,
    NULL::VARCHAR AS rollout_id,
    NULL::VARCHAR AS call_id,
    concat('rows/', stray.segment) AS place,
    concat(count(*), ' rows of a group that lineage does not know') AS detail
FROM rows AS stray
LEFT JOIN group_records AS groups ON stray.group_id = groups.group_id
WHERE groups.group_id IS NULL
GROUP BY stray.group_id, stray.segment
UNION ALL BY NAME
SELECT
    'row_differs' AS kind,
    'fault' AS severity,
    written.group_id,
    written.rollout_id,
    NULL::VARCHAR AS call_id,
    concat('rows/', written.segment) AS place,
    concat(
        'published as ', coalesce(written.reason, 'valid'), ', the records now give ', coalesce(now.reason, 'valid')
    ) AS detail
FROM written
INNER JOIN candidate_rows AS now
    ON
        written.group_id = now.group_id
        AND written.rollout_id = now.rollout_id
        AND written.segment_index = now.segment_index
LEFT JOIN retirements ON written.group_id = retirements.group_id
WHERE
    now.closed_by = 'group_published'
    AND retirements.group_id IS NULL
    AND (
        written.sample_mask IS DISTINCT FROM now.sample_mask
        OR written.reason IS DISTINCT FROM now.reason
        OR written.attempt IS DISTINCT FROM now.attempt
        OR written.segment_count IS DISTINCT FROM now.segment_count
        OR written.group_min_wv IS DISTINCT FROM now.group_min_wv
        OR written.group_max_wv IS DISTINCT FROM now.group_max_wv
        OR written.dropped_sampled_tokens IS DISTINCT FROM now.dropped_sampled_tokens
        OR (
            written.sample_mask = 1
            AND (
                written.reward IS DISTINCT FROM now.reward
                OR written.terminal_call_id IS DISTINCT FROM now.terminal_call_id
                OR written.weight_version_min IS DISTINCT FROM now.weight_version_min
                OR written.weight_version_max IS DISTINCT FROM now.weight_version_max
                OR written.temperature IS DISTINCT FROM now.temperature
                OR written.logprob_mode IS DISTINCT FROM now.logprob_mode
                OR written.truncated IS DISTINCT FROM now.truncated
                OR written.turns IS DISTINCT FROM now.turns
                OR written.sampled_tokens IS DISTINCT FROM now.sampled_tokens
                OR written.call_ids IS DISTINCT FROM now.call_ids
                OR written.prompt_ids_for_adv IS DISTINCT FROM now.prompt_ids_for_adv
                OR written.input_ids IS DISTINCT FROM now.input_ids
                OR written.token_mask IS DISTINCT FROM now.token_mask
                OR written.logprobs IS DISTINCT FROM now.logprobs
            )
        )
    )
UNION ALL BY NAME
SELECT
    CASE WHEN temperatures THEN 'mixed_temperature' ELSE 'mixed_logprob_mode' END AS kind,
    'notice' AS severity,
    group_id,
    NULL::VARCHAR AS rollout_id,
    NULL::VARCHAR AS call_id,
    NULL::VARCHAR AS place,
    'the chains of this group were not sampled alike' AS detail
FROM mixed
WHERE temperatures OR logprob_modes;
