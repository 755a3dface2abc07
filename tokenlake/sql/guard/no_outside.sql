-- what: from now on no query of this database reads or writes a file, opens a socket or loads an extension
-- grain: statement
-- reads: nothing
SET GLOBAL enable_external_access = FALSE;
