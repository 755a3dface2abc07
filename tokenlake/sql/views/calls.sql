-- what: lineage of every call, committed, failed or overflowed, of every attempt; `superseded`: a newer attempt
--   counts
-- grain: call
-- reads: lineage, attempts, group_of
CREATE OR REPLACE VIEW calls WITH (DEFER_BINDING) AS
WITH events AS (
    SELECT
        * EXCLUDE (group_id, attempt),
        coalesce(group_id, group_of(rollout_id)) AS group_id,
        coalesce(attempt, 0) AS attempt
    FROM lineage
    WHERE
        event_type IN ('call_committed', 'call_failed', 'call_overflowed')
        AND reason IS DISTINCT FROM 'answer_undelivered'
)

SELECT
    events.group_id,
    events.rollout_id,
    events.attempt,
    events.call_id,
    CASE events.event_type
        WHEN 'call_committed' THEN 'committed'
        WHEN 'call_failed' THEN 'failed'
        ELSE 'overflowed'
    END AS status,
    events.parent_call_id,
    events.root_call_id,
    events.depth,
    events.mode,
    events.prev_len,
    events.delta_len,
    events.cum_len,
    events.sampled_tokens,
    events.weight_version,
    events.weight_version_end,
    events.temperature,
    events.top_p,
    events.top_k,
    events.logprob_mode,
    events.finish_reason,
    events.response_id,
    events.dialect,
    events.reason,
    events.answered,
    events.digest,
    events.chain_hash,
    events.fingerprint,
    events.context_digest,
    events.prompt_digest,
    events.served_text,
    events.writer,
    events.segment,
    events.byte_offset,
    events.byte_length,
    events.batch_row,
    events.detail,
    events.at AS decided_at,
    coalesce(events.attempt <> attempts.attempt, FALSE) AS superseded
FROM events
LEFT JOIN attempts
    ON
        events.group_id = attempts.group_id
        AND events.rollout_id = attempts.rollout_id;
