-- what: the anchored head of each lineage log; NULLs: the anchor file is unreadable
-- grain: lineage writer
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_anchors (
    writer VARCHAR NOT NULL,
    event_seq BIGINT,
    event_hash VARCHAR
);
