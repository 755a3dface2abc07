-- what: what an audit has found so far, and the group it was looking at
-- grain: finding
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_found (
    audited VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    severity VARCHAR NOT NULL,
    group_id VARCHAR,
    rollout_id VARCHAR,
    call_id VARCHAR,
    place VARCHAR,
    detail VARCHAR
);
