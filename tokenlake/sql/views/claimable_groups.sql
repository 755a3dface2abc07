-- what: the groups that are there for every consumer: published, to train on. `claim_order` is the order in which all
--   of them get them, which is the order of publication
-- grain: group
-- reads: group_records
CREATE OR REPLACE VIEW claimable_groups WITH (DEFER_BINDING) AS
SELECT
    group_id,
    n,
    published_min_wv AS group_min_wv,
    published_max_wv AS group_max_wv,
    cutoff_at AS published_at,
    closing_order AS claim_order
FROM group_records
WHERE closed_by = 'group_published' AND purpose = 'train';
