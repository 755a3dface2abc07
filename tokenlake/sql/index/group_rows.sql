-- what: the part of the index that some groups need; it hides the whole one on its connection
-- grain: as tl_rows
-- reads: tl_rows
CREATE TEMP TABLE tl_rows AS
SELECT tl_rows.*
FROM tl_rows
WHERE group_id IN (SELECT unnest(?1::VARCHAR[]));
