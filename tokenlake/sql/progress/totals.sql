-- what: what an audit has looked at and found
-- grain: one row
-- reads: tl_audited, tl_found
SELECT
    (
        SELECT count(*) FROM tl_audited
        WHERE group_id <> ''
    ) AS groups,
    (SELECT coalesce(sum(calls), 0)::BIGINT FROM tl_audited) AS calls,
    (SELECT coalesce(sum(published), 0)::BIGINT FROM tl_audited) AS published,
    (
        SELECT count(*) FROM tl_found
        WHERE severity = 'fault'
    ) AS faults,
    (
        SELECT count(*) FROM tl_found
        WHERE severity <> 'fault'
    ) AS notices;
