-- what: how far each consumer is: groups it holds, has consumed, was too late for, and has still to get; its last
--   checkpoint
-- grain: consumer
-- reads: claims, claimable_groups
CREATE OR REPLACE VIEW consumers WITH (DEFER_BINDING) AS
WITH counted AS (
    SELECT
        consumer,
        count(*) FILTER (state = 'claimed') AS claimed,
        count(*) FILTER (state = 'consumed') AS consumed,
        count(*) FILTER (state = 'evicted') AS evicted,
        arg_max("checkpoint", change_order) FILTER (state = 'consumed') AS "checkpoint"
    FROM claims
    GROUP BY consumer
),

ready AS (
    SELECT count(*) AS groups FROM claimable_groups
)

SELECT
    counted.consumer,
    counted.claimed,
    counted.consumed,
    counted.evicted,
    ready.groups - counted.claimed - counted.consumed - counted.evicted AS waiting,
    counted.checkpoint AS "checkpoint"
FROM counted
CROSS JOIN ready;
