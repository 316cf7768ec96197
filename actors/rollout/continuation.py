"""Answers that are made in pieces: a request is stopped, and continued as another request.

    request ──stopped──> Partial ──continued──> request' ──finished──> Generation' ──joined──> Generation

The pieces may be of different weight versions; every token keeps the version and the log-prob it was drawn
with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from neoproto.data.generation import GenerateRequest, Generation, request_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """The beginning of an answer; three tuples of one length, as in `Generation`. May be empty."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    weight_versions: tuple[int, ...] = ()

    def followed_by(self, later: Partial) -> Partial:
        """Both pieces as one."""
        return Partial(
            token_ids=self.token_ids + later.token_ids,
            log_probs=self.log_probs + later.log_probs,
            weight_versions=self.weight_versions + later.weight_versions,
        )


def complete(request: GenerateRequest, made: Partial, reason: Literal["stop", "length"]) -> Generation:
    """The answer to a request that was not stopped: all of its tokens are the policy's."""
    return Generation(
        uid=request.uid,
        sample_index=request.sample_index,
        prompt_ids=request.prompt_ids,
        token_ids=made.token_ids,
        log_probs=made.log_probs,
        loss_mask=(1,) * len(made.token_ids),
        weight_versions=made.weight_versions,
        finish_reason=reason,
    )


def continued(request: GenerateRequest, made: Partial) -> GenerateRequest:
    """What is still to be asked for: the tokens made are part of the prompt, and count as generated.

    The seed differs with the number of tokens made. With the request's own seed, the first token of the
    continuation would be drawn with the random numbers that drew the first token of the answer.
    """
    if not made.token_ids:
        return request
    count = len(made.token_ids)
    return dataclasses.replace(
        request,
        prompt_ids=request.prompt_ids + made.token_ids,
        sampling=dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - count),
        seed=request_seed(request.seed, request.uid, request.sample_index, count),
    )


def joined(request: GenerateRequest, made: Partial, rest: Generation) -> Generation:
    """The answer to `request`, from its beginning and the answer to its continuation."""
    return dataclasses.replace(
        rest,
        prompt_ids=request.prompt_ids,
        token_ids=made.token_ids + rest.token_ids,
        log_probs=made.log_probs + rest.log_probs,
        loss_mask=(1,) * len(made.token_ids) + rest.loss_mask,
        weight_versions=made.weight_versions + rest.weight_versions,
    )
