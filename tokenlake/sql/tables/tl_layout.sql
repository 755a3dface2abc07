-- what: which tables this index has, so that one that another version left is noticed
-- grain: one row
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_layout (
    layout VARCHAR NOT NULL
);
