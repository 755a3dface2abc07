-- what: from now on a name in a query of this database is never a variable of the Python process around it
-- grain: statement
-- reads: nothing
SET GLOBAL python_enable_replacements = FALSE;
