-- what: the ancestry of each terminal, root first; it ends at a call that is missing or met before (a cycle), which
--   `call_checks` names
-- grain: rollout x call
-- reads: rollout_trees
CREATE OR REPLACE VIEW chains WITH (DEFER_BINDING) AS
WITH steps AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        call_ids,
        parents,
        unnest(path) AS number,
        generate_subscripts(path, 1)::INTEGER - 1 AS position
    FROM rollout_trees
    WHERE path IS NOT NULL
)

SELECT
    group_id,
    rollout_id,
    attempt,
    position,
    call_ids[number] AS call_id,
    call_ids[parents[number]] AS parent_call_id
FROM steps;
