-- what: the rows that publishing would write now, by the policy in force: of every group that is due, not closed, and
--   not to be dropped. All columns of a row but `row_digest` and `published_at`
-- grain: row
-- reads: candidate_rows
CREATE OR REPLACE VIEW publishable_rows WITH (DEFER_BINDING) AS
SELECT * EXCLUDE (rollout_index, valid_rows, n, closed_by, drop_reason)
FROM candidate_rows
WHERE closed_by IS NULL AND drop_reason IS NULL;
