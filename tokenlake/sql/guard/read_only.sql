-- what: a transaction that refuses every write, also one hidden in EXPLAIN ANALYZE or in a WITH clause
-- grain: statement
-- reads: nothing
BEGIN TRANSACTION READ ONLY; -- noqa: PRS
