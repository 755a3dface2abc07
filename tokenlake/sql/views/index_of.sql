-- what: the index of a rollout id in its group; NULL when the id has none
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO index_of(rollout) AS -- noqa: CP05
try_cast(regexp_extract(rollout, '_g([0-9]+)$', 1) AS INTEGER);
