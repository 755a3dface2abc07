-- what: every group: state, how many rollouts ended, how many rows are valid, versions, and what publishing would do
--   with it now (`wait`, `publish` or `drop`; NULL when it is closed)
-- grain: group
-- reads: group_states, group_versions
CREATE OR REPLACE VIEW groups WITH (DEFER_BINDING) AS
WITH judged AS (
    SELECT
        states.*,
        versions.valid,
        versions.placeholders,
        versions.group_min_wv,
        versions.group_max_wv,
        CASE
            WHEN states.state <> 'due' THEN states.drop_reason
            WHEN versions.valid / states.n < states.min_valid_fraction_per_group THEN 'min_valid_fraction_per_group'
            WHEN
                states.mixed_weight_version_per_group = 'reject'
                AND versions.valid > 0
                AND (
                    versions.group_min_wv IS DISTINCT FROM versions.group_max_wv OR versions.group_min_wv IS NULL
                )
                THEN 'mixed_weight_version_per_group'
        END AS why_dropped
    FROM group_states AS states
    INNER JOIN group_versions AS versions ON states.group_id = versions.group_id
)

SELECT
    group_id,
    n,
    state,
    ended,
    valid,
    placeholders,
    group_min_wv,
    group_max_wv,
    purpose,
    CASE
        WHEN state = 'open' THEN 'wait'
        WHEN state = 'due' AND why_dropped IS NOT NULL THEN 'drop'
        WHEN state = 'due' THEN 'publish'
    END AS verdict,
    why_dropped AS drop_reason,
    dispatch_weight_version,
    registered_at,
    deadline_at,
    CASE state WHEN 'published' THEN cutoff_at END AS published_at,
    meta
FROM judged;
