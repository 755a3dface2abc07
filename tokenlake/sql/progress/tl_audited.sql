-- what: how far an audit is: each group it has looked at, as large as it was then, and the digest of its records. The
--   group with the empty name is what belongs to none
-- grain: group
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_audited (
    group_id VARCHAR NOT NULL,
    events BIGINT NOT NULL,
    calls BIGINT NOT NULL,
    published BIGINT NOT NULL,
    digest VARCHAR NOT NULL
);
