-- what: adds places of rows that were read from a segment
-- grain: row
-- reads: tl_new
INSERT INTO tl_rows
SELECT
    segment,
    byte_offset,
    byte_length,
    batch_row,
    sample_id,
    segment_index,
    segment_count,
    rollout_id,
    group_id
FROM tl_new;
