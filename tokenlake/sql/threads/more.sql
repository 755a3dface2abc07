-- what: six threads more than DuckDB runs by itself. It cuts a fold into as many parts as it has threads and hands on a
--   part at a time; the fewer lists are in a part, the more often the next one has their memory without the kernel
-- grain: statement
-- reads: nothing
SET GLOBAL threads = current_setting('threads') + 6; -- noqa: PRS
