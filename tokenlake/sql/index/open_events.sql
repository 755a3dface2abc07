-- what: what a gate that starts has to know: every event of the groups that are open, and the latest policy, model,
--   published weight version and registration of each worker
-- grain: event
-- reads: tl_events
WITH open_groups AS (
    SELECT
        tl_group,
        min(event_seq) AS first_seq
    FROM tl_events
    WHERE event_type BETWEEN 'group_dropped' AND 'group_registered' -- as in group_records
    GROUP BY tl_group
    HAVING bool_and(event_type = 'group_registered')
),

latest AS (
    SELECT max(event_seq) AS event_seq
    FROM tl_events
    WHERE event_type IN ('policy_set', 'model_registered', 'weight_version_published', 'worker_registered')
    GROUP BY event_type, CASE WHEN event_type = 'worker_registered' THEN detail ->> '$.worker_id' END
)

SELECT
    event_seq,
    attempt,
    depth,
    prev_len,
    delta_len,
    cum_len,
    sampled_tokens,
    weight_version,
    weight_version_end,
    segment,
    byte_offset,
    byte_length,
    batch_row,
    n,
    reward,
    answered,
    chain_hash,
    digest,
    prompt_digest,
    fingerprint,
    context_digest,
    request_digest,
    idempotency_digest,
    event_type,
    event_writer,
    group_id,
    rollout_id,
    call_id,
    parent_call_id,
    root_call_id,
    mode,
    finish_reason,
    writer,
    response_id,
    reason,
    purpose,
    terminal_call_id,
    terminal_selection,
    served_text,
    detail,
    epoch_us("at") AS "at",
    epoch_us(deadline_at) AS deadline_at
FROM tl_events
WHERE
    event_seq IN (SELECT latest.event_seq FROM latest)
    OR (
        event_seq >= (SELECT min(open_groups.first_seq) FROM open_groups)
        AND tl_group IN (SELECT open_groups.tl_group FROM open_groups)
    )
ORDER BY event_seq;
