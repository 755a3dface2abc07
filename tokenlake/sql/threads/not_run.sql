-- what: seven of its threads are the process's own, which DuckDB does not start: the one that asks and the six more
-- grain: statement
-- reads: nothing
SET GLOBAL external_threads = 7;
