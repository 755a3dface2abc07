-- what: calls whose parent links lead into a cycle. A call in or behind one has no depth, so only those are looked at
-- grain: call
-- reads: committed_calls
CREATE OR REPLACE VIEW cyclic_calls AS
WITH rootless AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        call_id,
        any_value(parent_call_id) AS parent_call_id
    FROM committed_calls
    WHERE depth IS NULL
    GROUP BY group_id, rollout_id, attempt, call_id
),

numbered AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY group_id, rollout_id, attempt ORDER BY call_id) AS number
    FROM rootless
),

linked AS (
    SELECT
        calls.group_id,
        calls.rollout_id,
        calls.attempt,
        list(calls.call_id ORDER BY calls.number) AS call_ids,
        list(parents.number ORDER BY calls.number) AS parent_numbers
    FROM numbered AS calls
    LEFT JOIN numbered AS parents
        ON
            calls.group_id = parents.group_id
            AND calls.rollout_id = parents.rollout_id
            AND calls.attempt = parents.attempt
            AND calls.parent_call_id = parents.call_id
    GROUP BY calls.group_id, calls.rollout_id, calls.attempt
),

started AS (
    SELECT
        *,
        generate_subscripts(call_ids, 1) AS number
    FROM linked
)

SELECT
    group_id,
    rollout_id,
    attempt,
    call_ids[number] AS call_id
FROM started
WHERE list_reduce(range(len(call_ids)), lambda met, step: parent_numbers[met], number) IS NOT NULL;
