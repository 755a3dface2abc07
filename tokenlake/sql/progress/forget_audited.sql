-- what: an earlier look at some groups
-- grain: group
-- reads: tl_audited
DELETE FROM tl_audited
WHERE group_id IN (SELECT unnest(?1::VARCHAR[]));
