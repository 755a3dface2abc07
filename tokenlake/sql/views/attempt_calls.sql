-- what: the committed calls of the attempts that count, without those that came too late
-- grain: call
-- reads: committed_calls, attempts
CREATE OR REPLACE VIEW attempt_calls AS
SELECT committed_calls.*
FROM committed_calls
INNER JOIN attempts
    ON
        committed_calls.group_id = attempts.group_id
        AND committed_calls.rollout_id = attempts.rollout_id
        AND committed_calls.attempt = attempts.attempt
WHERE
    (
        attempts.ending IS NULL
        OR row(committed_calls.at, committed_calls.event_writer, committed_calls.event_seq)
        <= attempts.ending.event_order
    )
    AND (
        attempts.closing_order IS NULL
        OR row(committed_calls.at, committed_calls.event_writer, committed_calls.event_seq) <= attempts.closing_order
    );
