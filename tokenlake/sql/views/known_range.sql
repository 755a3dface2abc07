-- what: the least and the greatest of a list, both NULL where one of its values is unknown
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO known_range(given) AS -- noqa: CP05
{ -- noqa: PRS
    'least': CASE len(given) WHEN list_count(given) THEN list_min(given) END,
    'most': CASE len(given) WHEN list_count(given) THEN list_max(given) END
};
