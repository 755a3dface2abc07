-- what: the group of a rollout id, which is `{group_id}_g{index}`
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO group_of(rollout) AS -- noqa: CP05
left(rollout, length(rollout) - 1 - strpos(reverse(rollout), 'g_'));
