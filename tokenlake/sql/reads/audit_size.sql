-- what: how much an audit looks at
-- grain: one row
-- reads: lineage, deltas, rows
SELECT
    (SELECT count(*) FROM deltas) AS calls,
    (SELECT count(*) FROM rows) AS published;
