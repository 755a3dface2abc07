-- what: the events that judging some groups ?1 (a list) needs: theirs, and those of no group that a verdict depends on.
--   Columns that no verdict depends on are not here, since every operator pays for the width
-- grain: event
-- reads: tl_events
WITH wanted AS (
    -- Each is looked for by itself: a scan for one or the other reads every column of every event.
    SELECT rowid AS event_row
    FROM tl_events
    WHERE tl_group IN (SELECT unnest(?1::VARCHAR[]))
    UNION ALL
    SELECT rowid AS event_row
    FROM tl_events
    WHERE event_type IN ('policy_set', 'model_registered')
)

SELECT
    event_seq,
    "at",
    attempt,
    depth,
    prev_len,
    delta_len,
    cum_len,
    sampled_tokens,
    weight_version,
    weight_version_end,
    temperature,
    top_p,
    top_k,
    segment,
    byte_offset,
    n,
    reward,
    answered,
    deadline_at,
    cutoff_at,
    extras_digest,
    chain_hash,
    digest,
    prompt_digest,
    event_type,
    event_writer,
    group_id,
    rollout_id,
    call_id,
    parent_call_id,
    root_call_id,
    mode,
    finish_reason,
    logprob_mode,
    writer,
    response_id,
    dialect,
    reason,
    purpose,
    terminal_call_id,
    terminal_selection,
    detail
FROM tl_events
WHERE rowid IN (SELECT wanted.event_row FROM wanted);
