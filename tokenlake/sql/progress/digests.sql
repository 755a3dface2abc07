-- what: the digest of every group, in the order in which the digest of the lake takes them
-- grain: group
-- reads: tl_audited
SELECT
    group_id,
    digest
FROM tl_audited
WHERE digest <> sha256('')
ORDER BY group_id;
