-- what: closes it; all of it is in the file then
-- grain: statement
-- reads: nothing
DETACH snapshot; -- noqa: PRS
