-- what: how groups were closed, and what of them is retired
-- grain: group, of those given
-- reads: group_records, retirements
SELECT
    groups.group_id,
    groups.closed_by,
    coalesce(retirements.whole, FALSE) AS whole,
    coalesce(retirements.rollouts, []) AS rollouts,
    groups.n
FROM group_records AS groups
LEFT JOIN retirements ON groups.group_id = retirements.group_id
WHERE groups.group_id IN (SELECT unnest(?1::VARCHAR[]));
