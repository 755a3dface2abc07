-- what: every row on disk, read from the bytes each time, published or not; `segment` is the file that holds it
-- grain: row
-- reads: tl_rows
CREATE OR REPLACE VIEW rows WITH (DEFER_BINDING) AS
WITH fetched AS (
    SELECT
        sample_id,
        rollout_id,
        group_id,
        segment_index,
        segment_count,
        segment,
        tl_row(segment, byte_offset, byte_length, batch_row, sample_id, segment_index) AS record
    FROM tl_rows
    WHERE tl_has_row(segment, byte_offset, byte_length, batch_row, sample_id, segment_index)
)

SELECT
    record.schema_version AS schema_version,
    segment_index,
    segment_count,
    record.attempt AS attempt,
    record.sample_mask AS sample_mask,
    record.reward AS reward,
    record.weight_version_min AS weight_version_min,
    record.weight_version_max AS weight_version_max,
    record.group_min_wv AS group_min_wv,
    record.group_max_wv AS group_max_wv,
    record.temperature AS temperature,
    record.truncated AS truncated,
    record.turns AS turns,
    record.sampled_tokens AS sampled_tokens,
    record.dropped_sampled_tokens AS dropped_sampled_tokens,
    record.published_at AS published_at,
    record.row_digest AS row_digest,
    sample_id,
    rollout_id,
    group_id,
    record.reason AS reason,
    record.terminal_call_id AS terminal_call_id,
    record.logprob_mode AS logprob_mode,
    record.call_ids AS call_ids,
    record.prompt_ids_for_adv AS prompt_ids_for_adv,
    record.input_ids AS input_ids,
    record.token_mask AS token_mask,
    record.logprobs AS logprobs,
    segment
FROM fetched;
