-- what: the numbers from a call up to where its parent links end, the last one first. `parents` has the number of
--   each call's parent, NULL where there is none; a number that was met before (a cycle) ends the walk too
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO walk_path(parents, start_number) AS -- noqa: CP05
list_reduce( -- noqa: PRS
    parents,
    LAMBDA path, step: CASE
        WHEN parents[path[1]] IS NULL OR list_contains(path, parents[path[1]]) THEN path
        ELSE list_prepend(parents[path[1]], path)
    END,
    [start_number]
);
