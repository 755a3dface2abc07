-- what: vocabulary size and pad id of the model that was registered last
-- grain: one row
-- reads: lineage, json_text
CREATE OR REPLACE VIEW model_in_force WITH (DEFER_BINDING) AS
WITH latest AS (
    SELECT arg_max(detail, row(lineage.at, event_writer, event_seq)) AS detail
    FROM lineage
    WHERE event_type = 'model_registered'
)

SELECT
    try_cast(json_text(detail, '$.vocab_size') AS BIGINT) AS vocab_size,
    coalesce(try_cast(json_text(detail, '$.pad_id') AS INTEGER), 0) AS pad_id
FROM latest;
