-- what: what each ready row is worth to GRPO: its reward less the mean of the valid rollouts of its group, or of the
--   others (leave one out), and the same divided by the sample standard deviation of the valid. 0.0, never NaN, on a
--   placeholder and where there is no signal: fewer than two valid rollouts, or equal rewards, compared exactly. Sums
--   run over rewards in order of their value, so that no order of rows changes a bit; a rollout counts once, however
--   many segments it has. `trained_tokens`: what a row adds to the denominator of the loss
-- grain: row
-- reads: ready_rows, ordered_sum
CREATE OR REPLACE VIEW advantages WITH (DEFER_BINDING) AS
WITH grouped AS (
    SELECT
        group_id,
        rollout_id,
        sample_id,
        segment_index,
        sample_mask,
        reward,
        sampled_tokens,
        list_sort(
            list(reward) FILTER (sample_mask = 1 AND segment_index = 0) OVER (PARTITION BY group_id)
        ) AS rewards
    FROM ready_rows
),

averaged AS (
    SELECT
        *,
        len(rewards) AS valid,
        CASE
            WHEN sample_mask = 1 AND rewards[1] <> rewards[len(rewards)]
                THEN ordered_sum(rewards) / len(rewards)
        END AS average
    FROM grouped
),

measured AS (
    SELECT
        *,
        reward - average AS distance,
        valid::DOUBLE / (valid - 1) AS against_others,
        greatest(average - rewards[1], rewards[valid] - average) AS scale
    FROM averaged
),

scaled_rewards AS (
    SELECT
        *,
        list_transform(rewards, LAMBDA each: (each - average) / scale) AS scaled
    FROM measured
),

normalized AS (
    SELECT
        *,
        distance
        / scale
        / sqrt(ordered_sum(list_transform(scaled, LAMBDA each: each * each)) / (valid - 1)) AS deviations
    FROM scaled_rewards
)

SELECT
    group_id,
    rollout_id,
    sample_id,
    segment_index,
    sample_mask,
    reward,
    coalesce(distance, 0.0::DOUBLE) AS mean,
    coalesce(deviations, 0.0::DOUBLE) AS mean_normalized,
    coalesce(distance * against_others, 0.0::DOUBLE) AS leave_one_out,
    coalesce(deviations * against_others, 0.0::DOUBLE) AS leave_one_out_normalized,
    CASE sample_mask WHEN 1 THEN sampled_tokens ELSE 0 END AS trained_tokens
FROM normalized;
