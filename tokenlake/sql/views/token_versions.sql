-- what: under which weight version the sampled tokens of ready rows were sampled, as runs of positions of `input_ids`
--   from `begins` (0-based) up to and without `ends`. `weight_version` is NULL where nobody knows: an engine that does
--   not tell where new weights came in during a call, or a record that retention removed
-- grain: row x run of sampled tokens
-- reads: ready_rows, committed_calls, deltas
CREATE OR REPLACE VIEW token_versions WITH (DEFER_BINDING) AS
WITH placed AS (
    SELECT
        group_id,
        rollout_id,
        sample_id,
        segment_index,
        attempt,
        token_mask,
        unnest(call_ids) AS call_id
    FROM ready_rows
    WHERE sample_mask = 1
),

sampled AS (
    SELECT
        placed.group_id,
        placed.rollout_id,
        placed.sample_id,
        placed.segment_index,
        placed.attempt,
        placed.call_id,
        calls.cum_len - calls.sampled_tokens AS begins,
        calls.cum_len AS ends,
        calls.weight_version,
        (calls.weight_version IS DISTINCT FROM calls.weight_version_end) AS mixed
    FROM placed
    INNER JOIN committed_calls AS calls
        ON
            placed.group_id = calls.group_id
            AND placed.rollout_id = calls.rollout_id
            AND placed.attempt = calls.attempt
            AND placed.call_id = calls.call_id
    WHERE calls.sampled_tokens > 0 AND placed.token_mask[calls.cum_len - calls.sampled_tokens + 1] = 1
),

told AS (
    SELECT
        sampled.group_id,
        sampled.rollout_id,
        sampled.sample_id,
        sampled.segment_index,
        sampled.begins,
        sampled.ends,
        unnest(
            CASE
                WHEN len(deltas.weight_version_spans) > 0 THEN deltas.weight_version_spans
                ELSE [{ 'version': NULL, 'start': 0, 'end': sampled.ends - sampled.begins }]
            END
        ) AS span
    FROM sampled
    LEFT JOIN deltas
        ON
            sampled.group_id = deltas.group_id
            AND sampled.rollout_id = deltas.rollout_id
            AND sampled.attempt = deltas.attempt
            AND sampled.call_id = deltas.call_id
    WHERE sampled.mixed
)

SELECT
    group_id,
    rollout_id,
    sample_id,
    segment_index,
    begins,
    ends,
    weight_version
FROM sampled
WHERE NOT mixed
UNION ALL
SELECT
    group_id,
    rollout_id,
    sample_id,
    segment_index,
    begins + span.start AS begins,
    begins + span.end AS ends,
    span.version AS weight_version
FROM told;
