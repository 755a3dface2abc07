-- what: keeps that some groups were looked at, and the digest of each: SHA-256 of its lines in byte order, `e` and the
--   hash of an event, `r`, the sample, the segment and the digest of a published row. Who opened the lake and where
--   compaction put its bytes are no part of it
-- grain: group
-- reads: lineage, ready_rows, group_of
INSERT INTO tl_audited
WITH looked AS (
    SELECT
        unnest(?1::VARCHAR[]) AS group_id,
        unnest(?2::BIGINT[]) AS events,
        unnest(?3::BIGINT[]) AS calls,
        unnest(?4::BIGINT[]) AS published
),

lines AS (
    SELECT
        coalesce(group_id, group_of(rollout_id), '') AS group_id,
        'e ' || lower(hex(event_hash)) AS line
    FROM lineage
    WHERE event_type NOT IN ('lake_opened', 'segment_replaced')
    UNION ALL
    SELECT
        group_id,
        concat('r ', sample_id, ' ', segment_index, ' ', lower(hex(row_digest))) AS line
    FROM ready_rows
),

hashed AS (
    SELECT
        group_id,
        sha256(string_agg(line, chr(10) ORDER BY line)) AS digest
    FROM lines
    GROUP BY group_id
)

SELECT
    looked.group_id,
    looked.events,
    looked.calls,
    looked.published,
    coalesce(hashed.digest, sha256('')) AS digest
FROM looked
LEFT JOIN hashed ON looked.group_id = hashed.group_id;
