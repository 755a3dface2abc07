-- what: the places of deltas that were given, of which none is shadowed
-- grain: delta record
-- reads: nothing
CREATE VIEW tl_places AS
WITH given AS (
    SELECT unnest(tl_given_places(), max_depth := 2)
)

SELECT
    *,
    FALSE AS shadowed
FROM given;
