-- what: which tables this index has
-- grain: one row
-- reads: tl_layout
SELECT layout FROM tl_layout;
