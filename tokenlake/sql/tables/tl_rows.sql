-- what: where each training row lies
-- grain: row
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_rows (
    segment INTEGER NOT NULL,
    byte_offset BIGINT NOT NULL,
    byte_length INTEGER NOT NULL,
    batch_row INTEGER NOT NULL,
    sample_id VARCHAR NOT NULL,
    segment_index INTEGER NOT NULL,
    segment_count INTEGER NOT NULL,
    rollout_id VARCHAR NOT NULL,
    group_id VARCHAR NOT NULL
);
