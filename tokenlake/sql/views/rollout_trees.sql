-- what: the calls of the attempt that counts as a tree, and its terminal: declared, else the only leaf. An overflowed
--   call stands for its parent. No leaf is an abandoned retry: childless, while another call with the same parent and
--   the same prompt was continued. Leaves that are the same token sequence count as one. Calls that came after the
--   end of the attempt change nothing. `path`: numbers in `call_ids`, root first; it ends at a call that is missing
--   or met before (a cycle), which `call_checks` names. `side_chains`: where every chain becomes a row, those from a
--   root to each other leaf, by call ids, in the order in which the leaves were committed; else NULL
-- grain: rollout
-- reads: attempts, committed_calls, walk_path
CREATE OR REPLACE VIEW rollout_trees WITH (DEFER_BINDING) AS
WITH folded AS (
    SELECT
        attempts.group_id,
        attempts.rollout_id,
        attempts.attempt,
        any_value({
            'rollout_index': attempts.rollout_index,
            'n': attempts.n,
            'purpose': attempts.purpose,
            'closed_by': attempts.closed_by,
            'dispatch_weight_version': attempts.dispatch_weight_version,
            'mixed_weight_version': attempts.mixed_weight_version,
            'min_delivered_fraction': attempts.min_delivered_fraction,
            'min_valid_fraction_per_group': attempts.min_valid_fraction_per_group,
            'mixed_weight_version_per_group': attempts.mixed_weight_version_per_group,
            'row_policy': attempts.row_policy,
            'state': CASE
                WHEN attempts.ending = 'rollout_failed' THEN 'failed'
                WHEN attempts.ending = 'rollout_sealed' THEN 'sealed'
                WHEN attempts.frozen THEN 'frozen'
                ELSE 'open'
            END,
            'end_reason': attempts.end_reason,
            'reward': attempts.reward,
            'poison': attempts.poison,
            'poison_call_id': attempts.poison_call_id,
            'terminal_selection': coalesce(attempts.terminal_selection, 'declared')
        }) AS head,
        any_value(attempts.declared_call_id) AS declared,
        any_value(attempts.overflows) AS overflows,
        any_value(
            (attempts.frozen OR attempts.ending IS NOT NULL)
            AND coalesce(attempts.ending, '') <> 'rollout_failed'
        ) AS wanted,
        count(calls.call_id) AS calls,
        coalesce(sum(calls.sampled_tokens), 0)::BIGINT AS attempt_sampled_tokens,
        coalesce(sum(calls.delta_len), 0)::BIGINT AS attempt_tokens,
        coalesce(
            list({
                'event_order': row(calls.at, calls.event_writer, calls.event_seq),
                'call_id': calls.call_id,
                'parent_call_id': calls.parent_call_id,
                'chain_hash': calls.chain_hash,
                'finish_reason': calls.finish_reason,
                'prompt': row(
                    calls.parent_call_id,
                    calls.prev_len,
                    calls.delta_len - calls.sampled_tokens,
                    calls.prompt_digest
                )
            }) FILTER (calls.call_id IS NOT NULL),
            []
        ) AS tree
    FROM attempts
    LEFT JOIN committed_calls AS calls
        ON
            attempts.group_id = calls.group_id
            AND attempts.rollout_id = calls.rollout_id
            AND attempts.attempt = calls.attempt
            AND (
                attempts.end_order IS NULL
                OR row(calls.at, calls.event_writer, calls.event_seq) <= attempts.end_order
            )
            AND (
                attempts.closing_order IS NULL
                OR row(calls.at, calls.event_writer, calls.event_seq) <= attempts.closing_order
            )
    GROUP BY attempts.group_id, attempts.rollout_id, attempts.attempt
),

named AS (
    SELECT
        *,
        list_transform(tree, LAMBDA call: call.call_id) AS call_ids,
        list_filter(overflows, LAMBDA cut: cut.call_id = declared AND cut.attempt = attempt)[1] AS overflow
    FROM folded
),

linked AS (
    SELECT
        *,
        list_transform(tree, LAMBDA call: list_position(call_ids, call.parent_call_id)) AS parents
    FROM named
),

continued AS (
    SELECT
        *,
        list_transform(list_distinct(parents), LAMBDA parent: tree[parent].prompt) AS continued
    FROM linked
),

ended AS (
    SELECT
        *,
        CASE
            WHEN wanted AND declared IS NULL
                THEN
                    [
                        call FOR call, number IN tree
                        IF NOT list_contains(parents, number) AND NOT list_contains(continued, call.prompt)
                    ]
        END AS leaves
    FROM continued
),

resolved AS (
    SELECT
        *,
        list_position(
            call_ids,
            CASE
                WHEN NOT wanted THEN NULL
                WHEN overflow IS NOT NULL THEN overflow.parent_call_id
                WHEN declared IS NOT NULL THEN declared
                WHEN len(list_distinct(list_transform(leaves, LAMBDA call: call.chain_hash))) = 1
                    THEN list_min(leaves).call_id
            END
        ) AS terminal_number
    FROM ended
)

SELECT
    group_id,
    rollout_id,
    attempt,
    head,
    calls,
    attempt_sampled_tokens,
    attempt_tokens,
    call_ids,
    parents,
    call_ids[terminal_number] AS terminal_call_id,
    CASE
        WHEN terminal_number IS NULL THEN NULL
        WHEN declared IS NULL THEN 'only_leaf'
        ELSE head.terminal_selection
    END AS terminal_selection,
    coalesce(
        terminal_number IS NOT NULL
        AND (
            overflow IS NOT NULL
            OR tree[terminal_number].finish_reason IN ('length', 'max_tokens', 'max_output_tokens')
            OR (
                declared IS NULL
                AND len(
                    list_filter(
                        overflows, LAMBDA cut: cut.parent_call_id = call_ids[terminal_number] AND cut.attempt = attempt
                    )
                ) > 0
            )
        ),
        FALSE
    ) AS truncated,
    CASE
        WHEN NOT wanted OR terminal_number IS NOT NULL THEN NULL
        WHEN calls = 0 THEN 'no_calls'
        WHEN declared IS NOT NULL THEN 'terminal_unknown'
        WHEN len(leaves) = 0 THEN 'parent_cycle'
        ELSE 'terminal_ambiguous'
    END AS terminal_reason,
    CASE
        WHEN terminal_number IS NOT NULL
            THEN
                walk_path(parents, terminal_number)
    END AS path,
    CASE
        WHEN head.row_policy = 'segments' AND terminal_number IS NOT NULL
            THEN list_transform(
                list_sort(
                    [
                        { 'event_order': call.event_order, 'number': number } FOR call, number IN tree
                        IF NOT list_contains(parents, number) AND number <> terminal_number
                    ]
                ),
                LAMBDA leaf: {
                    'call_ids': list_select(call_ids, walk_path(parents, leaf.number)),
                    'truncated': coalesce(
                        tree[leaf.number].finish_reason IN ('length', 'max_tokens', 'max_output_tokens'), FALSE
                    )
                    OR coalesce(
                        len(
                            list_filter(
                                overflows,
                                LAMBDA cut: cut.parent_call_id = call_ids[leaf.number] AND cut.attempt = attempt
                            )
                        ) > 0,
                        FALSE
                    )
                }
            )
    END AS side_chains,
    CASE
        WHEN terminal_number IS NULL
            THEN [
                list_min(list_filter(tree, LAMBDA call: call.parent_call_id IS NULL)).call_id,
                list_min(
                    [
                        call FOR call, number IN tree
                        IF call.parent_call_id IS NOT NULL AND parents[number] IS NULL
                    ]
                ).call_id
            ]
    END AS root_and_orphan
FROM resolved;
