-- what: runs `due_rows` as it was planned
-- grain: as the statement
-- reads: nothing
EXECUTE due_rows;
