-- what: the rows of every group all of whose rollouts have ended, closed groups as they were when closed. A
--   placeholder has the prompt of its group as input, nothing sampled, no reward and one reason. `prompt_ids_for_adv`
--   is the prompt of the lowest valid row, else of the lowest rollout with a sound root, else one pad id. Of a valid
--   rollout of several segments, the first row is that of its terminal chain and says what none of them holds
-- grain: row
-- reads: judged_rollouts, model_in_force
CREATE OR REPLACE VIEW candidate_rows WITH (DEFER_BINDING) AS
WITH judged AS MATERIALIZED (
    SELECT * FROM judged_rollouts
),

grouped AS (
    SELECT
        group_id,
        count(*) FILTER (verdict <> 'open') AS ended,
        count(*) FILTER (verdict = 'valid') AS valid_rows,
        CASE
            WHEN count(*) FILTER (verdict = 'valid') = 0 THEN any_value(dispatch_weight_version)
            WHEN count(*) FILTER (verdict = 'valid' AND oldest_version IS NULL) = 0
                THEN min(oldest_version) FILTER (verdict = 'valid')
        END AS group_min_wv,
        CASE
            WHEN count(*) FILTER (verdict = 'valid') = 0 THEN any_value(dispatch_weight_version)
            WHEN count(*) FILTER (verdict = 'valid' AND newest_version IS NULL) = 0
                THEN max(newest_version) FILTER (verdict = 'valid')
        END AS group_max_wv,
        arg_min(prompt_ids, row(verdict <> 'valid', rollout_index)) FILTER (len(prompt_ids) > 0) AS prompt_ids
    FROM judged
    GROUP BY group_id
),

placed AS (
    SELECT
        judged.*,
        judged.verdict = 'valid' AS valid,
        grouped.valid_rows,
        grouped.group_min_wv,
        grouped.group_max_wv,
        coalesce(grouped.prompt_ids, [model_in_force.pad_id]) AS prompt_ids_for_adv
    FROM judged
    INNER JOIN grouped ON judged.group_id = grouped.group_id
    CROSS JOIN model_in_force
    WHERE grouped.ended = judged.n
),

beside AS (
    SELECT
        *,
        unnest(segments) AS segment,
        generate_subscripts(segments, 1) AS segment_index
    FROM placed
    WHERE valid AND len(segments) > 0
),

every_row AS (
    SELECT
        *,
        0 AS segment_index,
        attempt_sampled_tokens - CASE WHEN valid THEN delivered_tokens ELSE 0 END AS dropped_sampled_tokens
    FROM placed
    UNION ALL BY NAME
    SELECT
        * EXCLUDE (segment) REPLACE (
            segment.terminal_call_id AS terminal_call_id,
            segment.call_ids AS call_ids,
            segment.turns AS turns,
            segment.input_ids AS input_ids,
            segment.token_mask AS token_mask,
            segment.logprobs AS logprobs,
            segment.sampled_tokens AS sampled_tokens,
            segment.weight_version_min AS weight_version_min,
            segment.weight_version_max AS weight_version_max,
            segment.temperature AS temperature,
            segment.logprob_mode AS logprob_mode,
            segment.truncated AS truncated
        ),
        0 AS dropped_sampled_tokens
    FROM beside
)

SELECT
    1::INTEGER AS schema_version,
    segment_index::INTEGER AS segment_index,
    CASE WHEN valid THEN 1 + coalesce(len(segments), 0) ELSE 1 END::INTEGER AS segment_count,
    attempt::INTEGER AS attempt,
    valid::UTINYINT AS sample_mask,
    CASE WHEN valid THEN reward END AS reward,
    CASE WHEN valid THEN weight_version_min END AS weight_version_min,
    CASE WHEN valid THEN weight_version_max END AS weight_version_max,
    group_min_wv,
    group_max_wv,
    CASE WHEN valid THEN temperature END AS temperature,
    valid AND truncated AS truncated,
    CASE WHEN valid THEN turns ELSE 0 END::INTEGER AS turns,
    CASE WHEN valid THEN sampled_tokens ELSE 0 END::INTEGER AS sampled_tokens,
    dropped_sampled_tokens::INTEGER AS dropped_sampled_tokens,
    rollout_id AS sample_id,
    rollout_id,
    group_id,
    reason,
    CASE WHEN valid THEN terminal_call_id END AS terminal_call_id,
    CASE WHEN valid THEN logprob_mode END AS logprob_mode,
    CASE WHEN valid THEN call_ids ELSE []::VARCHAR[] END AS call_ids,
    prompt_ids_for_adv,
    CASE WHEN valid THEN input_ids ELSE prompt_ids_for_adv END AS input_ids,
    CASE WHEN valid THEN token_mask ELSE list_resize([]::UTINYINT[], len(prompt_ids_for_adv), 0::UTINYINT) END
        AS token_mask,
    CASE WHEN valid THEN logprobs ELSE list_resize([]::FLOAT[], len(prompt_ids_for_adv), 0::FLOAT) END AS logprobs,
    rollout_index,
    valid_rows,
    n,
    closed_by,
    CASE
        WHEN valid_rows / n < min_valid_fraction_per_group THEN 'min_valid_fraction_per_group'
        WHEN
            mixed_weight_version_per_group = 'reject'
            AND valid_rows > 0
            AND (group_min_wv IS DISTINCT FROM group_max_wv OR group_min_wv IS NULL)
            THEN 'mixed_weight_version_per_group'
    END AS drop_reason
FROM every_row;
