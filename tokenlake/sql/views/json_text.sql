-- what: one text of a JSON object in a `detail` column; NULL when there is none or the text is not JSON
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO json_text(detail, path) AS -- noqa: CP05
CASE WHEN json_valid(detail) THEN json_extract_string(detail, path) END;
