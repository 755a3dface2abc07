-- what: from now on no query changes a setting of this database
-- grain: statement
-- reads: nothing
SET GLOBAL lock_configuration = TRUE;
