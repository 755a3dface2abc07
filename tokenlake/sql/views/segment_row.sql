-- what: the sequence of a chain beside the terminal one. `chain`: its records, root first; `truncated`: whether it was
--   cut; `elsewhere`: the calls whose sampled tokens another row of the rollout trains: they are carried here, mask 0
-- grain: scalar
-- reads: known_range, common_value
CREATE OR REPLACE MACRO segment_row(chain, truncated, elsewhere) AS -- noqa: CP05
{ -- noqa: PRS
    'terminal_call_id': chain[len(chain)].call_id,
    'call_ids': list_transform(chain, LAMBDA call: call.call_id),
    'turns': len(chain),
    'input_ids': flatten(list_transform(chain, LAMBDA call: call.token_ids)),
    'token_mask': flatten(
        list_transform(
            chain,
            LAMBDA call: CASE
                WHEN list_contains(elsewhere, call.call_id)
                    THEN list_resize([]::UTINYINT[], len(call.token_mask), 0::UTINYINT)
                ELSE call.token_mask
            END
        )
    ),
    'logprobs': flatten(
        list_transform(
            chain,
            LAMBDA call: CASE
                WHEN list_contains(elsewhere, call.call_id) THEN list_resize([]::FLOAT[], len(call.logprobs), 0::FLOAT)
                ELSE call.logprobs
            END
        )
    ),
    'sampled_tokens': coalesce(
        list_sum([call.sampled_tokens FOR call IN chain IF NOT list_contains(elsewhere, call.call_id)]), 0
    )::BIGINT,
    'weight_version_min': known_range(list_transform(chain, LAMBDA call: call.weight_version)).least,
    'weight_version_max': known_range(list_transform(chain, LAMBDA call: call.weight_version_end)).most,
    'temperature': common_value(list_transform(chain, LAMBDA call: call.temperature)),
    'logprob_mode': common_value(list_transform(chain, LAMBDA call: call.logprob_mode)),
    'truncated': truncated
};
