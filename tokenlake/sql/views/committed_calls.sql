-- what: every committed call of every attempt, as the gate recorded it
-- grain: call
-- reads: lineage, group_of
CREATE OR REPLACE VIEW committed_calls WITH (DEFER_BINDING) AS
SELECT
    rollout_id,
    call_id,
    parent_call_id,
    root_call_id,
    depth,
    mode,
    prev_len,
    delta_len,
    cum_len,
    sampled_tokens,
    weight_version,
    weight_version_end,
    temperature,
    top_p,
    top_k,
    logprob_mode,
    finish_reason,
    digest,
    chain_hash,
    extras_digest,
    prompt_digest,
    response_id,
    dialect,
    reason,
    detail,
    writer,
    segment,
    byte_offset,
    lineage.at,
    event_writer,
    event_seq,
    coalesce(group_id, group_of(rollout_id)) AS group_id,
    coalesce(attempt, 0) AS attempt
FROM lineage
WHERE event_type = 'call_committed' AND rollout_id IS NOT NULL AND call_id IS NOT NULL;
