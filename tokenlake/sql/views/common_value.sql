-- what: the one value that all of a list have; NULL where they differ or one is unknown
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO common_value(given) AS -- noqa: CP05
CASE WHEN len(given) = list_count(given) AND list_min(given) = list_max(given) THEN list_min(given) END;
