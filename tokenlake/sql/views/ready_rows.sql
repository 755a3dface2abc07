-- what: published rows as they were written, placeholders included, whole groups only: what a trainer queries. Rows
--   that no `group_published` event names (left by a crash) are not here, and no later event changes what is
-- grain: row
-- reads: rows, lineage
CREATE OR REPLACE VIEW ready_rows WITH (DEFER_BINDING) AS
WITH folded AS (
    SELECT
        group_id,
        arg_min({ 'n': n }, row(lineage.at, event_writer, event_seq)) FILTER (event_type = 'group_registered')
            AS opening,
        arg_min(
            { 'event_type': event_type, 'segment': segment }, row(lineage.at, event_writer, event_seq)
        ) FILTER (event_type <> 'group_registered') AS closing
    FROM lineage
    -- No other event lies between: a scan looks at a range while it reads, and at a list of names only afterwards.
    WHERE event_type BETWEEN 'group_dropped' AND 'group_registered' AND group_id IS NOT NULL
    GROUP BY group_id
),

complete AS (
    SELECT
        groups.group_id,
        groups.closing.segment AS segment
    FROM folded AS groups
    INNER JOIN rows AS found
        ON
            groups.group_id = found.group_id
            AND groups.closing.segment = found.segment
    WHERE groups.closing.event_type = 'group_published'
    GROUP BY groups.group_id, groups.opening.n, groups.closing.segment
    HAVING
        list_unique(list(found.rollout_id)) = groups.opening.n
        AND list_unique(list(row(found.rollout_id, found.segment_index)))
        = sum(found.segment_count) FILTER (found.segment_index = 0)
)

SELECT
    ready.schema_version,
    ready.sample_id,
    ready.rollout_id,
    ready.segment_index,
    ready.segment_count,
    ready.group_id,
    ready.attempt,
    ready.input_ids,
    ready.token_mask,
    ready.logprobs,
    ready.sample_mask,
    ready.reason,
    ready.reward,
    ready.prompt_ids_for_adv,
    ready.terminal_call_id,
    ready.call_ids,
    ready.weight_version_min,
    ready.weight_version_max,
    ready.group_min_wv,
    ready.group_max_wv,
    ready.temperature,
    ready.logprob_mode,
    ready.truncated,
    ready.turns,
    ready.sampled_tokens,
    ready.dropped_sampled_tokens,
    ready.row_digest,
    ready.published_at
FROM rows AS ready
INNER JOIN complete
    ON
        ready.group_id = complete.group_id
        AND ready.segment = complete.segment;
