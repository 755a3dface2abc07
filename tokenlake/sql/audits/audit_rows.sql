-- what: rows on disk that do not say what was published: digest recomputed, shape checked
-- grain: finding
-- reads: rows, placeholder_reason
CREATE OR REPLACE VIEW audit_rows WITH (DEFER_BINDING) AS
WITH checked AS (
    SELECT
        group_id,
        rollout_id,
        sample_id,
        segment,
        coalesce(
            row_digest = tl_row_digest(
                schema_version,
                sample_id,
                rollout_id,
                group_id,
                segment_index,
                segment_count,
                attempt,
                sample_mask,
                reason,
                reward,
                weight_version_min,
                weight_version_max,
                group_min_wv,
                group_max_wv,
                temperature,
                logprob_mode,
                truncated,
                turns,
                sampled_tokens,
                dropped_sampled_tokens,
                terminal_call_id,
                call_ids,
                prompt_ids_for_adv,
                input_ids,
                token_mask,
                logprobs
            ),
            FALSE
        ) AS ok_digest,
        coalesce(
            len(input_ids) = len(token_mask)
            AND len(input_ids) = len(logprobs)
            AND len(prompt_ids_for_adv) > 0
            AND CASE sample_mask
                WHEN 1
                    THEN
                        reason IS NULL
                        AND reward IS NOT NULL
                        AND list_sum(token_mask) > 0
                        AND list_sum(token_mask) = sampled_tokens
                WHEN 0 THEN
                    placeholder_reason(reason, NULL) IS NOT NULL
                    AND reward IS NULL
                    AND list_sum(token_mask) = 0
                    AND input_ids = prompt_ids_for_adv
            END,
            FALSE
        ) AS ok_shape
    FROM rows
)

SELECT
    CASE WHEN ok_digest THEN 'row_malformed' ELSE 'row_digest_mismatch' END AS kind,
    'fault' AS severity,
    group_id,
    rollout_id,
    NULL::VARCHAR AS call_id,
    concat('rows/', segment) AS place,
    concat('sample ', sample_id) AS detail
FROM checked
WHERE NOT ok_digest OR NOT ok_shape;
