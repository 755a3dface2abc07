-- what: the policies in force: the last `policy_set`, defaults where it is silent
-- grain: one row
-- reads: lineage, json_text
CREATE OR REPLACE VIEW policies WITH (DEFER_BINDING) AS
WITH latest AS (
    SELECT arg_max(detail, row(lineage.at, event_writer, event_seq)) AS detail
    FROM lineage
    WHERE event_type = 'policy_set'
)

SELECT
    detail,
    coalesce(json_text(detail, '$.mixed_weight_version'), 'allow') AS mixed_weight_version,
    coalesce(try_cast(json_text(detail, '$.min_delivered_fraction') AS DOUBLE), 0) AS min_delivered_fraction,
    coalesce(try_cast(json_text(detail, '$.min_valid_fraction_per_group') AS DOUBLE), 0)
        AS min_valid_fraction_per_group,
    coalesce(json_text(detail, '$.mixed_weight_version_per_group'), 'allow') AS mixed_weight_version_per_group,
    coalesce(json_text(detail, '$.rows'), 'terminal') AS rows
FROM latest;
