-- what: the part of the index that some groups need; it hides the whole one on its connection
-- grain: as tl_events
-- reads: tl_events
CREATE TEMP TABLE tl_events AS
SELECT tl_events.*
FROM tl_events
WHERE tl_group IS NULL OR tl_group IN (SELECT unnest(?1::VARCHAR[]));
