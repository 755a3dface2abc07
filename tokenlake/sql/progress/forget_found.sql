-- what: what an earlier look at some groups found
-- grain: finding
-- reads: tl_found
DELETE FROM tl_found
WHERE audited IN (SELECT unnest(?1::VARCHAR[]));
