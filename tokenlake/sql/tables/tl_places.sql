-- what: where each delta record lies; `shadowed`: a later copy with the same key and digest stands for it
-- grain: delta record
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_places (
    writer VARCHAR NOT NULL,
    segment INTEGER NOT NULL,
    byte_offset BIGINT NOT NULL,
    byte_length INTEGER NOT NULL,
    batch_row INTEGER NOT NULL,
    rollout_id VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    call_id VARCHAR NOT NULL,
    digest BLOB NOT NULL,
    staged_at BIGINT NOT NULL,
    group_id VARCHAR NOT NULL,
    shadowed BOOLEAN NOT NULL
);
