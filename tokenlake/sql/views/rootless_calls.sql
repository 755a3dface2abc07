-- what: calls whose claimed ancestry reaches no root, and why: their parent links lead into a cycle, or their parent is
--   a call of another rollout or attempt of the group. Such calls have no depth, so only those are looked at. A call
--   with the same id elsewhere says nothing while the parent is in the attempt itself, which the reader has to check
-- grain: call
-- reads: committed_calls, walk_path
CREATE OR REPLACE VIEW rootless_calls WITH (DEFER_BINDING) AS
WITH orphans AS MATERIALIZED (
    SELECT
        group_id,
        rollout_id,
        attempt,
        call_id,
        parent_call_id
    FROM committed_calls
    WHERE depth IS NULL
),

folded AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        list({ 'call_id': call_id, 'parent_call_id': parent_call_id }) AS tree
    FROM orphans
    GROUP BY group_id, rollout_id, attempt
),

named AS (
    SELECT
        *,
        list_transform(tree, LAMBDA call: call.call_id) AS call_ids
    FROM folded
),

linked AS (
    SELECT
        *,
        list_transform(tree, LAMBDA call: list_position(call_ids, call.parent_call_id)) AS parents,
        generate_subscripts(call_ids, 1) AS number
    FROM named
),

named_faults AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        call_ids[number] AS call_id,
        'parent_cycle' AS reason
    FROM linked
    WHERE parents[walk_path(parents, number)[1]] IS NOT NULL
    UNION ALL BY NAME
    SELECT
        orphans.group_id,
        orphans.rollout_id,
        orphans.attempt,
        orphans.call_id,
        'parent_foreign' AS reason
    FROM orphans
    INNER JOIN committed_calls AS others
        ON
            orphans.group_id = others.group_id
            AND orphans.parent_call_id = others.call_id
)

SELECT
    group_id,
    rollout_id,
    attempt,
    call_id,
    min(reason) AS reason
FROM named_faults
GROUP BY group_id, rollout_id, attempt, call_id;
