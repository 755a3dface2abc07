-- what: opens the file ?1, which is not there yet, beside the index
-- grain: statement
-- reads: nothing
ATTACH ?1 AS snapshot; -- noqa: PRS
