-- what: remembers the anchored head of a lineage log
-- grain: lineage writer
-- reads: nothing
INSERT INTO tl_anchors (writer, event_seq, event_hash) VALUES (?1, ?2, ?3);
