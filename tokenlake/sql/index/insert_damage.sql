-- what: remembers a stretch that holds no readable record
-- grain: stretch
-- reads: nothing
INSERT INTO tl_damage (kind, writer, segment, place, detail) VALUES (?1, ?2, ?3, ?4, ?5);
