import dataclasses

import pytest

from neoproto.data.generation import Generation, SamplingParams, request_seed


def _generation(**changes):
    fields = {
        "uid": "a",
        "sample_index": 0,
        "prompt_ids": (1, 2),
        "token_ids": (3, 4),
        "log_probs": (-0.1, -0.2),
        "loss_mask": (1, 1),
        "weight_versions": (0, 0),
        "finish_reason": "stop",
    }
    return Generation(**{**fields, **changes})


def test_seed_is_stable_and_separates_every_argument():
    assert request_seed(1, "u", 0, 0) == 7943739673406023369
    seeds = {
        request_seed(1, "u", 0, 0),
        request_seed(2, "u", 0, 0),
        request_seed(1, "v", 0, 0),
        request_seed(1, "u", 1, 0),
        request_seed(1, "u", 0, 1),
        request_seed(1, "0/u", 0, 0),
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("name", ["log_probs", "loss_mask", "weight_versions"])
def test_per_token_fields_must_have_one_length(name):
    with pytest.raises(ValueError, match=rf"a/0: {name} has 1 entries, tokens 2"):
        _generation(**{name: (1,)})


def test_generation_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _generation().uid = "b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": float("nan")}, "temperature must be > 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_k": 0}, "top_k must be -1 or >= 1"),
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
    ],
)
def test_sampling_params_name_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_tokens": 4, **changes})
