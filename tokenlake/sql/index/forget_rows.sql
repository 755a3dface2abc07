-- what: takes out what was read from one segment
-- grain: segment
-- reads: tl_rows
DELETE FROM tl_rows
WHERE ?1 = '' AND segment = ?2;
