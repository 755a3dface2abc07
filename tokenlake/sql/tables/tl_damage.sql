-- what: stretches of segments that hold no readable record, as they were found while reading
-- grain: stretch
-- reads: nothing
CREATE TABLE IF NOT EXISTS tl_damage (
    kind VARCHAR NOT NULL,
    writer VARCHAR NOT NULL,
    segment INTEGER NOT NULL,
    place VARCHAR NOT NULL,
    detail VARCHAR NOT NULL
);
