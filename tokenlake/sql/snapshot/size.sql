-- what: how many events and places of records an index knows
-- grain: one row
-- reads: tl_events, tl_places
SELECT (SELECT count(*) FROM tl_events) + (SELECT count(*) FROM tl_places) AS size;
