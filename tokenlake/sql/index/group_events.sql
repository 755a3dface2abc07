-- what: the part of the index that some groups need; it hides the whole one on its connection
-- grain: as tl_events
-- reads: tl_events
CREATE TEMP TABLE tl_events AS
WITH wanted AS (
    -- Each is looked for by itself: a scan for one or the other reads every column of every event.
    SELECT rowid AS event_row
    FROM tl_events
    WHERE tl_group IN (SELECT unnest(?1::VARCHAR[]))
    UNION ALL
    SELECT rowid AS event_row
    FROM tl_events
    WHERE tl_group IS NULL
)

SELECT tl_events.*
FROM tl_events
WHERE rowid IN (SELECT wanted.event_row FROM wanted);
