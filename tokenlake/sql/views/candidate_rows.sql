-- what: the rows of every group all of whose rollouts have ended, closed groups as they were when closed. A
--   placeholder has the prompt of its group as input, nothing sampled, no reward and one reason. `prompt_ids_for_adv`
--   is the prompt of the lowest valid row, else of the lowest rollout with a sound root, else one pad id
-- grain: row
-- reads: judged_rollouts, model_in_force
CREATE OR REPLACE VIEW candidate_rows AS
WITH grouped AS (
    SELECT
        judged.*,
        judged.verdict = 'valid' AS valid,
        count(*) FILTER (judged.verdict <> 'open') OVER whole AS ended,
        count(*) FILTER (judged.verdict = 'valid') OVER whole AS valid_rows,
        CASE
            WHEN count(*) FILTER (judged.verdict = 'valid') OVER whole = 0 THEN judged.dispatch_weight_version
            WHEN count(*) FILTER (judged.verdict = 'valid' AND judged.weight_version_min IS NULL) OVER whole = 0
                THEN min(judged.weight_version_min) FILTER (judged.verdict = 'valid') OVER whole
        END AS group_min_wv,
        CASE
            WHEN count(*) FILTER (judged.verdict = 'valid') OVER whole = 0 THEN judged.dispatch_weight_version
            WHEN count(*) FILTER (judged.verdict = 'valid' AND judged.weight_version_max IS NULL) OVER whole = 0
                THEN max(judged.weight_version_max) FILTER (judged.verdict = 'valid') OVER whole
        END AS group_max_wv,
        coalesce(
            first_value(CASE WHEN len(judged.prompt_ids) > 0 THEN judged.prompt_ids END IGNORE NULLS) OVER (
                PARTITION BY judged.group_id
                ORDER BY judged.verdict <> 'valid', judged.rollout_index
                ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING
            ),
            [model_in_force.pad_id]
        ) AS prompt_ids_for_adv
    FROM judged_rollouts AS judged
    CROSS JOIN model_in_force
    WINDOW whole AS (PARTITION BY judged.group_id)
)

SELECT
    1::INTEGER AS schema_version,
    0::INTEGER AS segment_index,
    1::INTEGER AS segment_count,
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
    CASE
        WHEN valid THEN attempt_sampled_tokens - sampled_tokens
        ELSE attempt_sampled_tokens
    END::INTEGER AS dropped_sampled_tokens,
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
    valid_rows < min_valid_fraction_per_group * n AS too_few_valid
FROM grouped
WHERE ended = n;
