-- what: every place of every group with its verdict and, when it has a terminal, its sequence: what `rollouts`,
--   `linear_rows` and `publishable_rows` are cut from, so that tokens are read once. Arrays are gathered as
--   bytes and read as lists after the fold, those of a very long attempt as lists throughout; a second copy of a record
--   counts once. Without a terminal the first root is read for its prompt and the first orphan for its reason.
--   `segments`: where every chain becomes a row, those beside that of the terminal chain (chain 0). A chain that would
--   not be valid as a row, or holds no sampled token that another row does not, is none of them
-- grain: rollout
-- reads: rollout_trees, verified_calls, placeholder_reason, segment_row, known_range, common_value
CREATE OR REPLACE VIEW judged_rollouts WITH (DEFER_BINDING) AS
WITH listed AS (
    SELECT
        *,
        CASE WHEN path IS NULL THEN root_and_orphan ELSE list_select(call_ids, path) END AS main_calls
    FROM rollout_trees
),

numbered AS (
    SELECT
        * EXCLUDE (call_ids),
        len(main_calls) AS turns,
        CASE
            WHEN side_chains IS NULL THEN main_calls
            ELSE list_concat(main_calls, flatten(list_transform(side_chains, LAMBDA side: side.call_ids)))
        END AS call_ids,
        list_concat(
            list_resize([]::BIGINT[], len(main_calls), 0::BIGINT),
            flatten(
                [list_resize([]::BIGINT[], len(side.call_ids), number::BIGINT) FOR side, number IN side_chains]
            )
        ) AS chains
    FROM listed
),

placed AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        head,
        calls,
        attempt_sampled_tokens,
        terminal_call_id,
        terminal_selection,
        terminal_reason,
        truncated,
        side_chains,
        turns,
        len(call_ids) AS places,
        attempt_tokens > 200000 AS long,
        unnest(call_ids) AS call_id,
        unnest(chains) AS chain,
        generate_subscripts(call_ids, 1)::INTEGER - 1 AS position
    FROM numbered
),

folded AS (
    SELECT
        placed.group_id,
        placed.rollout_id,
        placed.attempt,
        any_value(placed.head) AS head,
        any_value(placed.calls) AS calls,
        any_value(placed.attempt_sampled_tokens) AS attempt_sampled_tokens,
        any_value(placed.terminal_call_id) AS terminal_call_id,
        any_value(placed.terminal_selection) AS terminal_selection,
        any_value(placed.terminal_reason) AS terminal_reason,
        any_value(placed.truncated) AS truncated,
        any_value(placed.side_chains) AS side_chains,
        any_value(placed.turns) AS turns,
        any_value(placed.places) AS every_place,
        list(placed.position) AS positions,
        list(placed.call_id) AS call_ids,
        list(calls.sampled_tokens) AS sampled_tokens,
        list(CASE WHEN NOT placed.long THEN calls.facts.packed END) AS packed,
        list(CASE WHEN placed.long OR calls.facts.packed IS NULL THEN calls.token_ids END) AS token_ids,
        list(CASE WHEN placed.long OR calls.facts.packed IS NULL THEN calls.token_mask END) AS token_mask,
        list(CASE WHEN placed.long OR calls.facts.packed IS NULL THEN calls.logprobs END) AS logprobs,
        list(calls.weight_version) AS weight_versions,
        list(calls.weight_version_end) AS weight_versions_end,
        list(calls.temperature) AS temperatures,
        list(calls.logprob_mode) AS logprob_modes,
        arg_min(
            {
                'reason': calls.reason,
                'call_id': calls.call_id,
                'detail': calls.detail,
                'other_record': calls.other_record
            },
            placed.position
        ) FILTER (calls.reason IS NOT NULL AND placed.chain = 0) AS fault,
        list({
            'position': placed.position,
            'chain': placed.chain,
            'sound': calls.reason IS NULL,
            'call_id': placed.call_id,
            'sampled_tokens': calls.sampled_tokens,
            'token_ids': CASE WHEN placed.chain > 0 THEN calls.token_ids END,
            'token_mask': CASE WHEN placed.chain > 0 THEN calls.token_mask END,
            'logprobs': CASE WHEN placed.chain > 0 THEN calls.logprobs END,
            'weight_version': calls.weight_version,
            'weight_version_end': calls.weight_version_end,
            'temperature': calls.temperature,
            'logprob_mode': calls.logprob_mode
        }) FILTER (placed.chain > 0) AS side_records,
        any_value(
            CASE
                WHEN
                    placed.position = 0
                    AND calls.parent_call_id IS NULL
                    AND calls.staged
                    AND calls.ok_digest
                    AND calls.ok_token_ids_present
                    AND calls.ok_token_ids_positive
                    AND calls.ok_token_ids_in_vocabulary
                    AND calls.ok_mask
                    THEN coalesce(calls.facts.first_sampled - 1, calls.facts.mask_len)
            END
        ) AS prompt_len
    FROM placed
    LEFT JOIN verified_calls AS calls
        ON
            placed.group_id = calls.group_id
            AND placed.rollout_id = calls.rollout_id
            AND placed.attempt = calls.attempt
            AND placed.call_id = calls.call_id
    GROUP BY placed.group_id, placed.rollout_id, placed.attempt
),

ordered AS (
    SELECT
        *,
        CASE
            WHEN len(positions) = every_place THEN list_grade_up(positions)[:turns]
            ELSE list_transform(range(turns), LAMBDA place: list_position(positions, place::INTEGER))
        END AS places,
        len(list_filter(positions, LAMBDA position: position < turns)) AS records
    FROM folded
),

joined AS (
    SELECT
        * EXCLUDE (
            head, side_chains, side_records, positions, places, every_place,
            call_ids, sampled_tokens, packed, token_ids, token_mask, logprobs,
            weight_versions, weight_versions_end, temperatures, logprob_modes
        ),
        head.rollout_index,
        head.n,
        head.purpose,
        head.closed_by,
        head.dispatch_weight_version,
        head.mixed_weight_version,
        head.min_delivered_fraction,
        head.min_valid_fraction_per_group,
        head.mixed_weight_version_per_group,
        head.state,
        head.end_reason,
        head.reward,
        head.poison,
        head.poison_call_id,
        known_range(list_select(weight_versions, places)).least AS weight_version_min,
        known_range(list_select(weight_versions_end, places)).most AS weight_version_max,
        common_value(list_select(temperatures, places)) AS temperature,
        common_value(list_select(logprob_modes, places)) AS logprob_mode,
        list_select(call_ids, places) AS call_ids,
        CASE
            WHEN terminal_call_id IS NULL THEN 0
            ELSE coalesce(list_sum(list_select(sampled_tokens, places)), 0)::BIGINT
        END AS sampled_tokens,
        tl_sequence(
            list_select(packed, places),
            list_select(token_ids, places),
            list_select(token_mask, places),
            list_select(logprobs, places)
        ) AS sequence,
        CASE
            WHEN side_records IS NOT NULL
                THEN [
                    {
                        'records': list_sort(
                            list_distinct([record FOR record IN side_records IF record.chain = number])
                        ),
                        'truncated': side.truncated
                    } FOR side, number IN side_chains
                ]
        END AS sides
    FROM ordered
),

sound AS (
    SELECT
        * REPLACE (
            list_filter(
                sides,
                LAMBDA side: NOT list_contains(list_transform(side.records, LAMBDA record: record.sound), FALSE)
                AND (
                    mixed_weight_version <> 'reject'
                    OR (
                        known_range(list_transform(side.records, LAMBDA record: record.weight_version)).least
                        IS NOT DISTINCT FROM
                        known_range(list_transform(side.records, LAMBDA record: record.weight_version_end)).most
                    )
                )
            ) AS sides
        )
    FROM joined
),

segmented AS (
    SELECT
        * EXCLUDE (sides),
        list_filter(
            [
                segment_row(
                    side.records,
                    side.truncated,
                    list_concat(
                        call_ids,
                        flatten(
                            list_transform(
                                sides[1:number - 1],
                                LAMBDA earlier: list_transform(earlier.records, LAMBDA record: record.call_id)
                            )
                        )
                    )
                ) FOR side, number IN sides
            ],
            LAMBDA segment: segment.sampled_tokens > 0
        ) AS segments
    FROM sound
),

summed AS (
    SELECT
        *,
        sampled_tokens + coalesce(list_sum(list_transform(segments, LAMBDA segment: segment.sampled_tokens)), 0)
            AS delivered_tokens,
        known_range(
            list_prepend(weight_version_min, list_transform(segments, LAMBDA segment: segment.weight_version_min))
        ).least AS oldest_version,
        known_range(
            list_prepend(weight_version_max, list_transform(segments, LAMBDA segment: segment.weight_version_max))
        ).most AS newest_version
    FROM segmented
),

reasoned AS (
    SELECT
        *,
        CASE
            WHEN state IN ('open', 'frozen') THEN NULL
            WHEN state = 'failed' THEN coalesce(end_reason, 'rollout_failed')
            WHEN end_reason IS NOT NULL THEN end_reason
            WHEN poison IS NOT NULL THEN poison
            WHEN terminal_call_id IS NULL AND fault.reason IN ('parent_missing', 'parent_foreign') THEN fault.reason
            WHEN terminal_call_id IS NULL THEN terminal_reason
            WHEN fault.other_record AND records > turns THEN 'duplicate_record'
            WHEN fault IS NOT NULL THEN fault.reason
            WHEN reward IS NULL THEN 'reward_missing'
            WHEN isnan(reward) OR isinf(reward) THEN 'non_finite_reward'
            WHEN sampled_tokens = 0 THEN 'no_sampled_tokens'
            WHEN mixed_weight_version = 'reject' AND (weight_version_min IS DISTINCT FROM weight_version_max)
                THEN 'mixed_weight_version'
            WHEN delivered_tokens / attempt_sampled_tokens < min_delivered_fraction THEN 'undelivered'
        END AS word
    FROM summed
)

SELECT
    * EXCLUDE (sequence),
    sequence.token_ids AS input_ids,
    sequence.token_mask AS token_mask,
    sequence.logprobs AS logprobs,
    sequence.token_ids[1:prompt_len] AS prompt_ids,
    placeholder_reason(word, CASE WHEN end_reason IS NULL THEN 'capture_failed' ELSE 'rollout_failed' END) AS reason,
    CASE
        WHEN state IN ('open', 'frozen') THEN 'open'
        WHEN word IS NULL THEN 'valid'
        ELSE 'placeholder'
    END AS verdict
FROM reasoned;
