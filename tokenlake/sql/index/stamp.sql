-- what: writes down which tables a new index has: `?1`
-- grain: one row
-- reads: tl_layout
INSERT INTO tl_layout
SELECT ?1
WHERE NOT EXISTS (SELECT layout FROM tl_layout);
