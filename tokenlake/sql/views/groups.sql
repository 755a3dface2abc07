-- what: every group: state, how many rollouts ended, how many rows are valid, versions, and what publishing would do
--   with it now (`wait`, `publish` or `drop`; NULL when it is closed)
-- grain: group
-- reads: group_states, group_versions
CREATE OR REPLACE VIEW groups AS
SELECT
    states.group_id,
    states.n,
    states.state,
    states.ended,
    versions.valid,
    versions.placeholders,
    versions.group_min_wv,
    versions.group_max_wv,
    states.purpose,
    CASE
        WHEN states.state = 'open' THEN 'wait'
        WHEN states.state = 'due' AND versions.valid < states.min_valid_fraction_per_group * states.n THEN 'drop'
        WHEN states.state = 'due' THEN 'publish'
    END AS verdict,
    coalesce(
        states.drop_reason,
        CASE
            WHEN states.state = 'due' AND versions.valid < states.min_valid_fraction_per_group * states.n
                THEN 'min_valid_fraction_per_group'
        END
    ) AS drop_reason,
    states.dispatch_weight_version,
    states.registered_at,
    states.deadline_at,
    CASE states.state WHEN 'published' THEN states.cutoff_at END AS published_at,
    states.meta
FROM group_states AS states
INNER JOIN group_versions AS versions ON states.group_id = versions.group_id;
