-- what: every committed call with its delta, and the outcome of every check that one record can fail. A check that has
--   nothing to look at passes: the absence is a finding of its own. `other_record`: the record is not the one that was
--   committed. `facts`: what its arrays come to, digests included, computed from their bytes, and those bytes
--   (`packed`) where they are whole. `reason`: the first fault in a fixed order; NULL when the record is sound
-- grain: call x record (one, unless a second was staged)
-- reads: committed_calls, deltas, rootless_calls, retirements, model_in_force
CREATE OR REPLACE VIEW verified_calls WITH (DEFER_BINDING) AS
WITH joined AS (
    SELECT
        calls.group_id,
        calls.rollout_id,
        calls.attempt,
        calls.call_id,
        calls.parent_call_id,
        calls.prev_len,
        calls.cum_len,
        calls.delta_len,
        calls.sampled_tokens,
        calls.weight_version,
        calls.weight_version_end,
        calls.temperature,
        calls.logprob_mode,
        calls.finish_reason,
        calls.detail,
        calls.writer,
        calls.segment,
        calls.byte_offset,
        deltas.token_ids,
        deltas.token_mask,
        deltas.logprobs,
        deltas.call_id IS NOT NULL AS staged,
        deltas.digest,
        deltas.chain_hash,
        deltas.schema_version,
        parents.call_id IS NOT NULL AS parent_found,
        parents.cum_len AS parent_cum_len,
        parents.chain_hash AS parent_chain_hash,
        parents.weight_version_end AS parent_weight_version,
        parents.depth AS parent_depth,
        parents.root_call_id AS parent_root,
        calls.depth,
        calls.root_call_id,
        (parents.call_id IS NULL AND coalesce(rootless.reason = 'parent_foreign', FALSE)) AS parent_foreign,
        coalesce(rootless.reason = 'parent_cycle', FALSE) AS cyclic,
        (deltas.call_id IS NOT NULL AND calls.digest IS DISTINCT FROM deltas.digest) AS other_record,
        coalesce(retirements.whole OR list_contains(retirements.rollouts, calls.rollout_id), FALSE) AS retired,
        tl_delta_facts(
            parents.chain_hash,
            model_in_force.vocab_size,
            deltas.schema_version,
            deltas.rollout_id,
            deltas.attempt,
            deltas.call_id,
            deltas.parent_call_id,
            deltas.mode,
            deltas.prev_len,
            deltas.cum_len,
            deltas.weight_version,
            deltas.weight_version_end,
            deltas.finish_reason,
            deltas.sampling,
            deltas.extras,
            deltas.chain_hash,
            deltas.token_ids,
            deltas.token_mask,
            deltas.logprobs
        ) AS facts,
        (
            calls.digest IS NOT DISTINCT FROM deltas.digest
            AND calls.chain_hash IS NOT DISTINCT FROM deltas.chain_hash
            AND calls.extras_digest IS NOT DISTINCT FROM deltas.extras_digest
            AND calls.parent_call_id IS NOT DISTINCT FROM deltas.parent_call_id
            AND calls.root_call_id IS NOT DISTINCT FROM deltas.root_call_id
            AND calls.depth IS NOT DISTINCT FROM deltas.depth
            AND calls.mode IS NOT DISTINCT FROM deltas.mode
            AND calls.finish_reason IS NOT DISTINCT FROM deltas.finish_reason
            AND calls.prev_len IS NOT DISTINCT FROM deltas.prev_len
            AND calls.cum_len IS NOT DISTINCT FROM deltas.cum_len
            AND calls.temperature IS NOT DISTINCT FROM deltas.sampling.temperature
            AND calls.top_p IS NOT DISTINCT FROM deltas.sampling.top_p
            AND calls.top_k IS NOT DISTINCT FROM deltas.sampling.top_k
            AND calls.logprob_mode IS NOT DISTINCT FROM deltas.sampling.logprob_mode
        ) AS lineage_equal,
        (
            calls.weight_version IS NOT DISTINCT FROM deltas.weight_version
            AND calls.weight_version_end IS NOT DISTINCT FROM deltas.weight_version_end
            AND (
                coalesce(len(deltas.weight_version_spans), 0) = 0
                OR coalesce(
                    deltas.weight_version_spans[1]['start'] = 0
                    AND deltas.weight_version_spans[1]['version'] = calls.weight_version
                    AND deltas.weight_version_spans[-1]['version'] = calls.weight_version_end
                    AND deltas.weight_version_spans[-1]['end'] = calls.sampled_tokens,
                    FALSE
                )
            )
        ) AS weight_version_equal
    FROM committed_calls AS calls
    LEFT JOIN deltas
        ON
            calls.group_id = deltas.group_id
            AND calls.rollout_id = deltas.rollout_id
            AND calls.attempt = deltas.attempt
            AND calls.call_id = deltas.call_id
    LEFT JOIN committed_calls AS parents
        ON
            calls.group_id = parents.group_id
            AND calls.rollout_id = parents.rollout_id
            AND calls.attempt = parents.attempt
            AND calls.parent_call_id = parents.call_id
    LEFT JOIN rootless_calls AS rootless
        ON
            calls.group_id = rootless.group_id
            AND calls.rollout_id = rootless.rollout_id
            AND calls.attempt = rootless.attempt
            AND calls.call_id = rootless.call_id
    LEFT JOIN retirements ON calls.group_id = retirements.group_id
    CROSS JOIN model_in_force
),

checked AS (
    SELECT
        *,
        NOT staged OR coalesce(schema_version = 1, FALSE) AS ok_schema_version,
        staged OR retired AS ok_delta_present,
        staged OR NOT retired AS ok_not_retired,
        NOT staged OR coalesce(digest = facts.digest, FALSE) AS ok_digest,
        parent_call_id IS NULL OR parent_found OR parent_foreign AS ok_parent_present,
        NOT parent_foreign AS ok_parent_same_attempt,
        NOT cyclic AS ok_parent_acyclic,
        CASE
            WHEN parent_call_id IS NULL THEN coalesce(prev_len = 0, FALSE)
            ELSE NOT parent_found OR coalesce(prev_len = parent_cum_len, FALSE)
        END AS ok_parent_length,
        NOT staged OR facts.ids_whole AS ok_token_ids_present,
        NOT staged OR facts.logprobs_len IS NOT NULL AS ok_logprobs_present,
        NOT staged
        OR (
            coalesce(facts.ids_len = facts.mask_len, TRUE)
            AND coalesce(facts.ids_len = facts.logprobs_len, TRUE)
            AND coalesce(prev_len + facts.ids_len = cum_len, facts.ids_len IS NULL)
        ) AS ok_lengths,
        NOT staged OR facts.mask_sound AS ok_mask,
        NOT staged
        OR facts.ids_len IS NULL
        OR (parent_call_id IS NOT NULL AND NOT parent_found)
        OR coalesce(chain_hash = facts.chain_hash, FALSE) AS ok_chain_hash,
        NOT staged
        OR (
            lineage_equal
            AND coalesce(delta_len = facts.ids_len, facts.ids_len IS NULL)
            AND coalesce(
                sampled_tokens = coalesce(facts.mask_len - facts.first_sampled + 1, 0), facts.mask_len IS NULL
            )
            AND CASE
                WHEN depth IS NULL THEN TRUE
                WHEN parent_call_id IS NULL THEN depth = 0 AND coalesce(root_call_id = call_id, FALSE)
                WHEN NOT parent_found THEN TRUE
                ELSE coalesce(depth = parent_depth + 1, FALSE) AND root_call_id IS NOT DISTINCT FROM parent_root
            END
        ) AS ok_lineage,
        NOT staged OR weight_version_equal AS ok_weight_version,
        facts.ids_positive AS ok_token_ids_positive,
        facts.ids_in_vocabulary AS ok_token_ids_in_vocabulary,
        facts.logprobs_whole AS ok_logprobs_no_null,
        facts.logprobs_no_nan AS ok_logprobs_no_nan,
        facts.logprobs_finite AS ok_logprobs_finite,
        facts.logprobs_not_positive AS ok_logprobs_not_positive,
        facts.logprobs_no_sentinel AS ok_logprobs_no_sentinel,
        facts.logprobs_zero_unsampled AS ok_logprobs_zero_unsampled,
        coalesce(weight_version >= parent_weight_version, TRUE) AS ok_weight_version_monotone
    FROM joined
)

SELECT
    *,
    CASE
        WHEN NOT ok_schema_version THEN 'unknown_schema'
        WHEN NOT ok_delta_present THEN 'delta_missing'
        WHEN NOT ok_not_retired THEN 'retired'
        WHEN other_record THEN 'lineage_mismatch'
        WHEN NOT ok_digest THEN 'digest_mismatch'
        WHEN NOT ok_parent_present THEN 'parent_missing'
        WHEN NOT ok_parent_same_attempt THEN 'parent_foreign'
        WHEN NOT ok_parent_acyclic THEN 'parent_cycle'
        WHEN NOT ok_parent_length THEN 'parent_length_mismatch'
        WHEN NOT ok_token_ids_present THEN 'token_ids_missing'
        WHEN NOT ok_logprobs_present THEN 'logprobs_missing'
        WHEN NOT ok_lengths THEN 'length_mismatch'
        WHEN NOT ok_mask THEN 'mask_invalid'
        WHEN NOT ok_chain_hash THEN 'chain_hash_mismatch'
        WHEN NOT ok_lineage THEN 'lineage_mismatch'
        WHEN NOT ok_weight_version THEN 'weight_version_mismatch'
        WHEN NOT ok_token_ids_positive THEN 'token_id_negative'
        WHEN NOT ok_token_ids_in_vocabulary THEN 'token_id_out_of_vocabulary'
        WHEN NOT ok_logprobs_no_null THEN 'logprob_null'
        WHEN NOT ok_logprobs_no_nan THEN 'logprob_nan'
        WHEN NOT ok_logprobs_finite THEN 'logprob_infinite'
        WHEN NOT ok_logprobs_not_positive THEN 'logprob_positive'
        WHEN NOT ok_logprobs_no_sentinel THEN 'logprob_sentinel'
        WHEN NOT ok_logprobs_zero_unsampled THEN 'logprob_nonzero_unsampled'
    END AS reason
FROM checked;
