-- what: remembers how far a segment has been read
-- grain: segment
-- reads: nothing
INSERT INTO tl_segments (kind, writer, segment, scanned, ended, inode) VALUES (?1, ?2, ?3, ?4, ?5, ?6);
