-- what: every check of every committed call. `ok` is never NULL; `reason` is what a placeholder row says when a call
--   of its chain fails the check, NULL for a passed check and for one that no row fails for. A notice is worth
--   knowing and no fault; `retired` says that retention removed the record, which leaves nothing to train on
-- grain: call x check
-- reads: checked_calls
CREATE OR REPLACE VIEW call_checks WITH (DEFER_BINDING) AS
WITH listed AS (
    SELECT
        group_id,
        rollout_id,
        attempt,
        call_id,
        detail,
        concat('deltas/', writer, '/', segment, '@', byte_offset) AS place,
        unnest([
            { 'name': 'schema_version', 'ok': ok_schema_version, 'reason': 'unknown_schema', 'severity': 'fault' },
            { 'name': 'delta_present', 'ok': ok_delta_present, 'reason': 'delta_missing', 'severity': 'fault' },
            { 'name': 'not_retired', 'ok': ok_not_retired, 'reason': 'retired', 'severity': 'notice' },
            { 'name': 'single_record', 'ok': ok_single_record, 'reason': 'duplicate_record', 'severity': 'fault' },
            { 'name': 'single_copy', 'ok': ok_single_copy, 'reason': NULL, 'severity': 'notice' },
            { 'name': 'digest', 'ok': ok_digest, 'reason': 'digest_mismatch', 'severity': 'fault' },
            { 'name': 'parent_present', 'ok': ok_parent_present, 'reason': 'parent_missing', 'severity': 'fault' },
            {
                'name': 'parent_same_attempt',
                'ok': ok_parent_same_attempt,
                'reason': 'parent_foreign',
                'severity': 'fault'
            },
            { 'name': 'parent_acyclic', 'ok': ok_parent_acyclic, 'reason': 'parent_cycle', 'severity': 'fault' },
            {
                'name': 'parent_length', 'ok': ok_parent_length, 'reason': 'parent_length_mismatch', 'severity': 'fault'
            },
            {
                'name': 'token_ids_present',
                'ok': ok_token_ids_present,
                'reason': 'token_ids_missing',
                'severity': 'fault'
            },
            {
                'name': 'logprobs_present', 'ok': ok_logprobs_present, 'reason': 'logprobs_missing', 'severity': 'fault'
            },
            { 'name': 'lengths', 'ok': ok_lengths, 'reason': 'length_mismatch', 'severity': 'fault' },
            { 'name': 'mask', 'ok': ok_mask, 'reason': 'mask_invalid', 'severity': 'fault' },
            { 'name': 'chain_hash', 'ok': ok_chain_hash, 'reason': 'chain_hash_mismatch', 'severity': 'fault' },
            { 'name': 'lineage', 'ok': ok_lineage, 'reason': 'lineage_mismatch', 'severity': 'fault' },
            {
                'name': 'weight_version',
                'ok': ok_weight_version,
                'reason': 'weight_version_mismatch',
                'severity': 'fault'
            },
            {
                'name': 'token_ids_positive',
                'ok': ok_token_ids_positive,
                'reason': 'token_id_negative',
                'severity': 'fault'
            },
            {
                'name': 'token_ids_in_vocabulary',
                'ok': ok_token_ids_in_vocabulary,
                'reason': 'token_id_out_of_vocabulary',
                'severity': 'fault'
            },
            { 'name': 'logprobs_no_null', 'ok': ok_logprobs_no_null, 'reason': 'logprob_null', 'severity': 'fault' },
            { 'name': 'logprobs_no_nan', 'ok': ok_logprobs_no_nan, 'reason': 'logprob_nan', 'severity': 'fault' },
            { 'name': 'logprobs_finite', 'ok': ok_logprobs_finite, 'reason': 'logprob_infinite', 'severity': 'fault' },
            {
                'name': 'logprobs_not_positive',
                'ok': ok_logprobs_not_positive,
                'reason': 'logprob_positive',
                'severity': 'fault'
            },
            {
                'name': 'logprobs_no_sentinel',
                'ok': ok_logprobs_no_sentinel,
                'reason': 'logprob_sentinel',
                'severity': 'fault'
            },
            {
                'name': 'logprobs_zero_unsampled',
                'ok': ok_logprobs_zero_unsampled,
                'reason': 'logprob_nonzero_unsampled',
                'severity': 'fault'
            },
            {
                'name': 'weight_version_monotone',
                'ok': ok_weight_version_monotone,
                'reason': NULL,
                'severity': 'notice'
            }
        ]) AS checked
    FROM checked_calls
)

SELECT
    group_id,
    rollout_id,
    attempt,
    call_id,
    checked.name AS check_name,
    checked.ok,
    CASE WHEN NOT checked.ok THEN checked.reason END AS reason,
    checked.severity,
    place,
    CASE WHEN NOT checked.ok THEN detail END AS detail
FROM listed;
