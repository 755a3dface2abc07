-- what: the rows of those of the given groups that are due, with their digest, also of groups that a policy drops, and
--   the policies in force
-- grain: row
-- reads: candidate_rows, policies
PREPARE due_rows AS
SELECT
    *,
    (SELECT policies.detail FROM policies) AS policy,
    tl_row_digest(
        schema_version, sample_id, rollout_id, group_id, segment_index, segment_count, attempt, sample_mask, reason,
        reward, weight_version_min, weight_version_max, group_min_wv, group_max_wv, temperature, logprob_mode,
        truncated, turns, sampled_tokens, dropped_sampled_tokens, terminal_call_id, call_ids, prompt_ids_for_adv,
        input_ids, token_mask, logprobs
    ) AS row_digest
FROM candidate_rows
WHERE closed_by IS NULL
ORDER BY group_id, length(sample_id), sample_id, segment_index;
