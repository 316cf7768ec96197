"""Log-probs of responses under a causal language model, with and without gradient.

Shapes: B = rows, R = response width of the batch; b, r = those of a micro-batch; v = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.training.padded_batch import MicroBatch, PaddedBatch
from neoproto.algorithms.logprobs import entropy_from_logits, log_probs_from_logits


def response_logits(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Logits [b, r, v] of which position t predicts response token t.

    The head is applied to the r + 1 last positions only, the last prompt token being the first of them.
    """
    output = model(
        input_ids=micro.input_ids,
        attention_mask=micro.attention_mask,
        position_ids=micro.position_ids,
        use_cache=False,
        logits_to_keep=micro.response_width + 1,
    )
    logits: Tensor = output.logits
    return logits[:, :-1]


@torch.no_grad()
def score_responses(
    model: nn.Module, batch: PaddedBatch, *, temperature: float, micro_batch_size: int, entropy: bool
) -> dict[str, Tensor]:
    """Log-probs of the response tokens and, if asked for, entropies of what they were drawn from.

    Args:
        temperature: the one the responses were sampled with.

    Returns:
        `log_probs` and `entropys`, float32 [B, R] on the CPU, nats, 0 outside the response mask.
    """
    shape = (len(batch), batch.response_width)
    scores = {"log_probs": torch.zeros(shape)} | ({"entropys": torch.zeros(shape)} if entropy else {})
    for micro in batch.micro_batches(torch.arange(len(batch)), micro_batch_size):
        logits = response_logits(model, micro)
        found = {"log_probs": log_probs_from_logits(logits, micro["responses"], temperature)}
        if entropy:
            found["entropys"] = entropy_from_logits(logits, temperature)
        kept = micro["response_mask"] != 0
        for name, values in found.items():
            scores[name][micro.rows, : micro.response_width] = torch.where(kept, values.float(), 0.0).cpu()
    return scores
