-- what: the delta records of the lake, read from the bytes each time: a record that is missing or unreadable is absent,
--   and of identical copies under one key the last one counts; `group_id`, from the rollout id, is there to filter by
-- grain: delta record
-- reads: tl_places
CREATE OR REPLACE VIEW deltas WITH (DEFER_BINDING) AS
WITH fetched AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        call_id,
        tl_delta(writer, segment, byte_offset, byte_length, batch_row, rollout_id, attempt, call_id) AS record
    FROM tl_places
    WHERE
        NOT shadowed
        AND tl_has_delta(writer, segment, byte_offset, byte_length, batch_row, rollout_id, attempt, call_id)
)

SELECT
    record.schema_version AS schema_version,
    attempt,
    record.depth AS depth,
    record.prev_len AS prev_len,
    record.cum_len AS cum_len,
    record.weight_version AS weight_version,
    record.weight_version_end AS weight_version_end,
    record.staged_at AS staged_at,
    record.extras_digest AS extras_digest,
    record.chain_hash AS chain_hash,
    record.digest AS digest,
    record.sampling AS sampling,
    group_id,
    rollout_id,
    call_id,
    record.parent_call_id AS parent_call_id,
    record.root_call_id AS root_call_id,
    record.mode AS mode,
    record.finish_reason AS finish_reason,
    record.weight_version_spans AS weight_version_spans,
    record.generation_segments AS generation_segments,
    record.extras AS extras,
    record.token_ids AS token_ids,
    record.token_mask AS token_mask,
    record.logprobs AS logprobs
FROM fetched;
