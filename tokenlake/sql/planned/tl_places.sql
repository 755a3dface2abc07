-- what: the places of deltas that were given
-- grain: delta record
-- reads: nothing
CREATE VIEW tl_places AS
SELECT unnest(tl_given_places(), max_depth := 2);
