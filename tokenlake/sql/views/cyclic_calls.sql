-- what: calls whose parent links lead into a cycle. A call in or behind one has no depth, so only those are looked at
-- grain: call
-- reads: committed_calls, walk_path
CREATE OR REPLACE VIEW cyclic_calls AS
WITH folded AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        list({ 'call_id': call_id, 'parent_call_id': parent_call_id }) AS tree
    FROM committed_calls
    WHERE depth IS NULL
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
)

SELECT DISTINCT
    group_id,
    rollout_id,
    attempt,
    call_ids[number] AS call_id
FROM linked
WHERE parents[walk_path(parents, number)[1]] IS NOT NULL;
