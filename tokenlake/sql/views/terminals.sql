-- what: the call whose answer was scored, for every sealed or frozen rollout: declared, else the only leaf. An
--   overflowed call stands for its parent. Leaves that are the same token sequence count as one
-- grain: rollout
-- reads: attempts, attempt_tree, overflows
CREATE OR REPLACE VIEW terminals AS
WITH counted AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        count(*) AS calls,
        sum(sampled_tokens)::BIGINT AS attempt_sampled_tokens,
        count(DISTINCT chain_hash) FILTER (is_leaf) AS endings,
        arg_min(call_id, event_order) FILTER (is_leaf) AS only_leaf,
        arg_min(call_id, event_order) FILTER (parent_call_id IS NULL) AS first_root
    FROM attempt_tree
    GROUP BY group_id, rollout_id, attempt
),

claimed AS (
    SELECT
        attempts.group_id,
        attempts.rollout_id,
        attempts.attempt,
        attempts.ending.terminal_selection AS terminal_selection,
        counted.only_leaf,
        counted.first_root,
        coalesce(attempts.ending.terminal_call_id, attempts.frozen_terminal) AS declared,
        (attempts.frozen OR attempts.ending IS NOT NULL)
        AND coalesce(attempts.ending.kind <> 'rollout_failed', TRUE) AS wanted,
        coalesce(counted.calls, 0) AS calls,
        coalesce(counted.attempt_sampled_tokens, 0) AS attempt_sampled_tokens,
        coalesce(counted.endings, 0) AS endings
    FROM attempts
    LEFT JOIN counted
        ON
            attempts.group_id = counted.group_id
            AND attempts.rollout_id = counted.rollout_id
            AND attempts.attempt = counted.attempt
),

resolved AS (
    SELECT
        claimed.*,
        ended.call_id IS NOT NULL AS overflowed,
        CASE
            WHEN NOT claimed.wanted THEN NULL
            WHEN ended.call_id IS NOT NULL THEN ended.parent_call_id
            WHEN claimed.declared IS NOT NULL THEN claimed.declared
            WHEN claimed.endings = 1 THEN claimed.only_leaf
        END AS resolved_call_id
    FROM claimed
    LEFT JOIN overflows AS ended
        ON
            claimed.group_id = ended.group_id
            AND claimed.rollout_id = ended.rollout_id
            AND claimed.attempt = ended.attempt
            AND claimed.declared = ended.call_id
)

SELECT
    resolved.group_id,
    resolved.rollout_id,
    resolved.attempt,
    resolved.calls,
    resolved.attempt_sampled_tokens,
    resolved.first_root,
    tree.call_id AS terminal_call_id,
    tree.root_call_id,
    tree.depth,
    CASE
        WHEN tree.call_id IS NULL THEN NULL
        WHEN resolved.declared IS NULL THEN 'only_leaf'
        ELSE coalesce(resolved.terminal_selection, 'declared')
    END AS terminal_selection,
    coalesce(tree.straight, FALSE) AS straight,
    tree.call_id IS NOT NULL
    AND (
        resolved.overflowed
        OR coalesce(tree.finish_reason IN ('length', 'max_tokens', 'max_output_tokens'), FALSE)
        OR (resolved.declared IS NULL AND cut.parent_call_id IS NOT NULL)
    ) AS truncated,
    CASE
        WHEN NOT resolved.wanted OR tree.call_id IS NOT NULL THEN NULL
        WHEN resolved.calls = 0 THEN 'no_calls'
        WHEN resolved.declared IS NOT NULL THEN 'terminal_unknown'
        ELSE 'terminal_ambiguous'
    END AS reason
FROM resolved
LEFT JOIN attempt_tree AS tree
    ON
        resolved.group_id = tree.group_id
        AND resolved.rollout_id = tree.rollout_id
        AND resolved.attempt = tree.attempt
        AND resolved.resolved_call_id = tree.call_id
LEFT JOIN (
    SELECT DISTINCT
        group_id,
        rollout_id,
        attempt,
        parent_call_id
    FROM overflows
) AS cut
    ON
        resolved.group_id = cut.group_id
        AND resolved.rollout_id = cut.rollout_id
        AND resolved.attempt = cut.attempt
        AND resolved.resolved_call_id = cut.parent_call_id;
