-- what: a word when it is in the closed list of placeholder reasons, else the word given for all others; NULL for
--   NULL
-- grain: scalar
-- reads: nothing
CREATE OR REPLACE MACRO placeholder_reason(word, otherwise) AS -- noqa: CP05
CASE
    WHEN
        list_contains(
            [
                'never_sealed',
                'incomplete',
                'environment_failed',
                'agent_failed',
                'verifier_failed',
                'timeout',
                'cancelled',
                'rollout_failed',
                'capture_failed',
                'call_failed',
                'call_id_conflict',
                'unresolved_parent',
                'no_calls',
                'terminal_ambiguous',
                'terminal_unknown',
                'delta_missing',
                'retired',
                'duplicate_record',
                'unknown_schema',
                'digest_mismatch',
                'chain_hash_mismatch',
                'length_mismatch',
                'parent_missing',
                'parent_foreign',
                'parent_length_mismatch',
                'parent_cycle',
                'lineage_mismatch',
                'mask_invalid',
                'token_ids_missing',
                'token_id_negative',
                'token_id_out_of_vocabulary',
                'logprobs_missing',
                'logprob_null',
                'logprob_nan',
                'logprob_infinite',
                'logprob_positive',
                'logprob_sentinel',
                'logprob_nonzero_unsampled',
                'weight_version_mismatch',
                'non_finite_reward',
                'reward_missing',
                'no_sampled_tokens',
                'mixed_weight_version',
                'undelivered'
            ],
            word
        )
        THEN word
    WHEN word IS NOT NULL THEN otherwise
END;
