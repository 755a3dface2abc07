-- what: the ancestry of each terminal, root first. Straight chains come from root and depth; the others are walked along
--   parent links, which ends at a call that is missing or met before (a cycle): `call_checks` names those
-- grain: rollout x call
-- reads: terminals, attempt_calls
CREATE OR REPLACE VIEW chains AS
WITH straight AS (
    SELECT
        calls.group_id,
        calls.rollout_id,
        calls.attempt,
        calls.depth AS position,
        calls.call_id,
        calls.parent_call_id
    FROM terminals
    INNER JOIN attempt_calls AS calls
        ON
            terminals.group_id = calls.group_id
            AND terminals.rollout_id = calls.rollout_id
            AND terminals.attempt = calls.attempt
            AND terminals.root_call_id = calls.root_call_id
            AND terminals.depth >= calls.depth
    WHERE terminals.straight
),

rivals AS (
    SELECT
        calls.group_id,
        calls.rollout_id,
        calls.attempt,
        calls.call_id,
        any_value(terminals.terminal_call_id) AS terminal_call_id,
        any_value(calls.parent_call_id) AS parent_call_id
    FROM terminals
    INNER JOIN attempt_calls AS calls
        ON
            terminals.group_id = calls.group_id
            AND terminals.rollout_id = calls.rollout_id
            AND terminals.attempt = calls.attempt
    WHERE NOT terminals.straight AND terminals.terminal_call_id IS NOT NULL
    GROUP BY calls.group_id, calls.rollout_id, calls.attempt, calls.call_id
),

numbered AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY group_id, rollout_id, attempt ORDER BY call_id) AS number
    FROM rivals
),

linked AS (
    SELECT
        calls.group_id,
        calls.rollout_id,
        calls.attempt,
        list(calls.call_id ORDER BY calls.number) AS call_ids,
        list(calls.parent_call_id ORDER BY calls.number) AS parent_call_ids,
        list(parents.number ORDER BY calls.number) AS parent_numbers,
        max(calls.number) FILTER (calls.call_id = calls.terminal_call_id) AS terminal_number
    FROM numbered AS calls
    LEFT JOIN numbered AS parents
        ON
            calls.group_id = parents.group_id
            AND calls.rollout_id = parents.rollout_id
            AND calls.attempt = parents.attempt
            AND calls.parent_call_id = parents.call_id
    GROUP BY calls.group_id, calls.rollout_id, calls.attempt
),

walked AS (
    SELECT
        *,
        list_reduce(
            range(len(call_ids)),
            lambda path, step: CASE
                WHEN parent_numbers[path[1]] IS NULL OR list_contains(path, parent_numbers[path[1]]) THEN path
                ELSE list_prepend(parent_numbers[path[1]], path)
            END,
            [terminal_number]
        ) AS path
    FROM linked
),

steps AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        call_ids,
        parent_call_ids,
        unnest(path) AS number,
        generate_subscripts(path, 1)::INTEGER - 1 AS position
    FROM walked
)

SELECT * FROM straight
UNION ALL BY NAME
SELECT
    group_id,
    rollout_id,
    attempt,
    position,
    call_ids[number] AS call_id,
    parent_call_ids[number] AS parent_call_id
FROM steps;
