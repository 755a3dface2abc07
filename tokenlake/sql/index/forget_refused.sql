-- what: takes out events whose append was refused after their bytes were written: the next segment begins with others
--   in their place
-- grain: event
-- reads: tl_events
DELETE FROM tl_events AS refused
WHERE
    refused.event_seq >= (
        SELECT min(later.event_seq)
        FROM tl_events AS later
        WHERE later.tl_writer = refused.tl_writer AND later.tl_segment > refused.tl_segment
    );
