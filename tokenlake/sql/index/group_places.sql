-- what: the part of the index that some groups need; it hides the whole one on its connection
-- grain: as tl_places
-- reads: tl_places
CREATE TEMP TABLE tl_places AS
SELECT tl_places.*
FROM tl_places
WHERE group_id IN (SELECT unnest(?1::VARCHAR[]));
