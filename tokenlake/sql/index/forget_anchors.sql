-- what: takes out every anchor
-- grain: lineage writer
-- reads: tl_anchors
DELETE FROM tl_anchors;
