-- what: remembers a stretch that holds no readable record
-- grain: stretch
-- reads: nothing
INSERT INTO tl_damage (kind, writer, segment, place, detail) VALUES ($kind, $writer, $segment, $place, $detail);
