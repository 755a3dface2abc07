-- what: the rows of the groups ?2 as publishing writes them, with their digest, at ?1 (microseconds since the epoch)
-- grain: row
-- reads: publishable_rows
SELECT
    *,
    make_timestamptz(?1::BIGINT) AS published_at,
    tl_row_digest(
        schema_version, sample_id, rollout_id, group_id, segment_index, segment_count, attempt, sample_mask, reason,
        reward, weight_version_min, weight_version_max, group_min_wv, group_max_wv, temperature, logprob_mode,
        truncated, turns, sampled_tokens, dropped_sampled_tokens, terminal_call_id, call_ids, prompt_ids_for_adv,
        input_ids, token_mask, logprobs
    ) AS row_digest
FROM publishable_rows
WHERE list_contains(?2::VARCHAR[], group_id)
ORDER BY group_id, length(sample_id), sample_id, segment_index;
