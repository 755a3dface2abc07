-- what: every finding about the records of some groups, or of a whole lake: all that one group can tell by itself
-- grain: finding
-- reads: audit_calls, audit_rows, audit_orphans, audit_duplicates, audit_lineage, audit_groups
CREATE OR REPLACE VIEW audit_records WITH (DEFER_BINDING) AS
SELECT * FROM audit_calls
UNION ALL BY NAME
SELECT * FROM audit_rows
UNION ALL BY NAME
SELECT * FROM audit_orphans
UNION ALL BY NAME
SELECT * FROM audit_duplicates
UNION ALL BY NAME
SELECT * FROM audit_lineage
UNION ALL BY NAME
SELECT * FROM audit_groups;
