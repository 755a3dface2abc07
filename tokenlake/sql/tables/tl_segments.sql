-- what: how far each segment has been read; `kind` is the folder, `inode` the file that was read, of a sealed one its
--   stamp
-- grain: segment
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_segments (
    kind VARCHAR NOT NULL,
    writer VARCHAR NOT NULL,
    segment INTEGER NOT NULL,
    scanned BIGINT NOT NULL,
    ended BOOLEAN NOT NULL,
    inode UBIGINT NOT NULL
);
