-- what: the events that were given, with the columns that judging needs
-- grain: event
-- reads: nothing
CREATE VIEW lineage AS
SELECT unnest(tl_given_events(), max_depth := 2);
