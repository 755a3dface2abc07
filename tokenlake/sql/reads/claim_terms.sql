-- what: what a claim goes by where it does not say: the policy's `max_staleness` and the trainer's published version
-- grain: one row
-- reads: policies, lineage, json_text
SELECT
    try_cast(json_text(policies.detail, '$.max_staleness') AS BIGINT) AS max_staleness,
    (
        SELECT max(lineage.weight_version)
        FROM lineage
        WHERE lineage.event_type = 'weight_version_published'
    ) AS published_version
FROM policies;
