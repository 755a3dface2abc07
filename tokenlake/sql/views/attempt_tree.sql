-- what: the calls of the attempts that count, as a tree. `is_leaf`: nothing continues the call, and it is no abandoned
--   retry (childless, while another call with the same parent and the same prompt was continued). `straight`: the
--   ancestry of the call is all the calls of its root up to its depth, so that no walk is needed
-- grain: call
-- reads: attempt_calls
CREATE OR REPLACE VIEW attempt_tree AS
WITH parents AS (
    SELECT DISTINCT
        group_id,
        rollout_id,
        attempt,
        parent_call_id
    FROM attempt_calls
    WHERE parent_call_id IS NOT NULL
),

marked AS (
    SELECT
        calls.group_id,
        calls.rollout_id,
        calls.attempt,
        calls.call_id,
        calls.parent_call_id,
        calls.root_call_id,
        calls.depth,
        calls.chain_hash,
        calls.prev_len,
        calls.sampled_tokens,
        calls.prompt_digest,
        calls.finish_reason,
        calls.delta_len - calls.sampled_tokens AS carried_tokens,
        row(calls.at, calls.event_writer, calls.event_seq) AS event_order,
        parents.parent_call_id IS NOT NULL AS continued,
        coalesce(
            CASE
                WHEN calls.parent_call_id IS NULL THEN calls.depth = 0 AND calls.root_call_id = calls.call_id
                ELSE
                    calls.parent_call_id = lag(calls.call_id) OVER line
                    AND calls.depth = lag(calls.depth) OVER line + 1
            END,
            FALSE
        ) AS follows
    FROM attempt_calls AS calls
    LEFT JOIN parents
        ON
            calls.group_id = parents.group_id
            AND calls.rollout_id = parents.rollout_id
            AND calls.attempt = parents.attempt
            AND calls.call_id = parents.parent_call_id
    WINDOW
        line AS (
            PARTITION BY calls.group_id, calls.rollout_id, calls.attempt, calls.root_call_id
            ORDER BY calls.depth
        )
)

SELECT
    group_id,
    rollout_id,
    attempt,
    call_id,
    parent_call_id,
    root_call_id,
    depth,
    chain_hash,
    sampled_tokens,
    finish_reason,
    event_order,
    NOT continued
    AND NOT bool_or(continued) OVER (
        PARTITION BY group_id, rollout_id, attempt, parent_call_id, prev_len, carried_tokens, prompt_digest
    ) AS is_leaf,
    coalesce(
        count(*) OVER (
            PARTITION BY group_id, rollout_id, attempt, root_call_id
            ORDER BY depth
        ) = depth + 1
        AND bool_and(follows) OVER (
            PARTITION BY group_id, rollout_id, attempt, root_call_id
            ORDER BY depth
        ),
        FALSE
    ) AS straight
FROM marked;
