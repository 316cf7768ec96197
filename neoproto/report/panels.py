"""Which metrics are drawn, together with what, and in which unit: one table for the page and the pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from neoproto.report.reading import RunData

Kind = Literal["lines", "stacked", "growth"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One or several metrics of a panel.

    Attributes:
        metric: a name, or a pattern of one (`timing_s/(?!step$).*`), each match being a line.
        label: in the legend; `{}` stands for the part that the pattern's group took.
        band: metrics of the lower and upper edge of a shade around it.
        markers: few points, worth a mark each.
        scale: the value is multiplied by it.
    """

    metric: str
    label: str
    band: tuple[str, str] | None = None
    markers: bool = False
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One chart.

    Attributes:
        key: names its picture and its element in the page.
        unit: of the vertical axis.
        kind: lines; stacked (phases of a step); growth (a counter's increase from step to step).
        log: the vertical axis is logarithmic.
        help: one sentence below the title.
        picture: drawn as a PNG too.
    """

    key: str
    section: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    help: str = ""
    kind: Kind = "lines"
    log: bool = False
    picture: bool = False


def spread(prefix: str, label: str) -> Line:
    """The mean of a metric, in a shade from its minimum to its maximum."""
    return Line(metric=f"{prefix}/mean", label=label, band=(f"{prefix}/min", f"{prefix}/max"))


MIB = 2.0**-20
BESIDE_A_STEP = "(?:step|testing|save_checkpoint)$"
"""Times that are no phase of a step: its whole, and what stands between two."""
PHASES = "Time and throughput"
LEARNING, OFF_POLICY, STORE = "Learning", "Off-policy samples", "Store and weights"

PANELS: tuple[Panel, ...] = (
    Panel(
        key="score",
        section=LEARNING,
        title="Score",
        unit="mean score",
        help="Of the training samples, with validation accuracy where it was taken.",
        lines=(
            Line(metric="critic/score/mean", label="training"),
            Line(metric="val-core/(.*)", label="validation {}", markers=True),
        ),
        picture=True,
    ),
    Panel(
        key="validation",
        section=LEARNING,
        title="Validation",
        unit="accuracy",
        help="Held-out questions, by data source and way of drawing answers.",
        lines=(Line(metric="val-(?:core|aux)/(.*)", label="{}", markers=True),),
        picture=True,
    ),
    Panel(
        key="reward",
        section=LEARNING,
        title="Reward",
        unit="reward",
        help="The score after penalties, mean over samples.",
        lines=(Line(metric="critic/rewards/mean", label="mean"),),
    ),
    Panel(
        key="entropy",
        section=LEARNING,
        title="Entropy of the policy",
        unit="nats per token",
        lines=(Line(metric="actor/entropy", label="entropy"),),
        picture=True,
    ),
    Panel(
        key="kl",
        section=LEARNING,
        title="KL divergence",
        unit="nats per token",
        help="Of each update from the policy before it, and from the reference where there is one.",
        lines=(
            Line(metric="actor/ppo_kl", label="update"),
            Line(metric="actor/kl_loss", label="reference, in the loss"),
            Line(metric="actor/reward_kl_penalty", label="reference, in the reward"),
        ),
        picture=True,
    ),
    Panel(
        key="kl_coefficient",
        section=LEARNING,
        title="Weight of the KL penalty",
        unit="coefficient",
        lines=(Line(metric="actor/reward_kl_penalty_coeff", label="in the reward"),),
    ),
    Panel(
        key="response_length",
        section=LEARNING,
        title="Response length",
        unit="tokens",
        help="Mean, in a shade from the shortest to the longest.",
        lines=(spread("response_length", "mean"),),
        picture=True,
    ),
    Panel(
        key="cut",
        section=LEARNING,
        title="Responses cut at the limit",
        unit="share of samples",
        lines=(Line(metric="response_length/clip_ratio", label="cut"),),
    ),
    Panel(
        key="judge",
        section=LEARNING,
        title="Answers that a judge failed on",
        unit="samples per batch",
        lines=(Line(metric="reward/(timeouts|errors)", label="{}"),),
    ),
    Panel(
        key="clip",
        section=LEARNING,
        title="Clipped by PPO",
        unit="share of tokens",
        lines=(
            Line(metric="actor/pg_clipfrac", label="policy ratio"),
            Line(metric="actor/pg_clipfrac_lower", label="dual clip"),
            Line(metric="critic/vf_clipfrac", label="value"),
        ),
        picture=True,
    ),
    Panel(
        key="policy_loss",
        section=LEARNING,
        title="Policy loss",
        unit="loss",
        lines=(Line(metric="actor/pg_loss", label="policy loss"),),
        picture=True,
    ),
    Panel(
        key="value_loss",
        section=LEARNING,
        title="Value loss",
        unit="loss",
        lines=(Line(metric="critic/vf_loss", label="value loss"),),
        picture=True,
    ),
    Panel(
        key="explained_variance",
        section=LEARNING,
        title="Variance of returns that values explain",
        unit="share",
        lines=(Line(metric="critic/vf_explained_var", label="explained"),),
    ),
    Panel(
        key="values",
        section=LEARNING,
        title="Returns and values",
        unit="reward",
        help="Mean over tokens.",
        lines=(
            Line(metric="critic/returns/mean", label="returns"),
            Line(metric="critic/values/mean", label="values"),
        ),
    ),
    Panel(
        key="advantages",
        section=LEARNING,
        title="Advantages",
        unit="advantage",
        help="Mean over tokens, in a shade from the lowest to the highest.",
        lines=(spread("critic/advantages", "mean"),),
    ),
    Panel(
        key="grad_norm",
        section=LEARNING,
        title="Gradient norm, before clipping",
        unit="norm",
        log=True,
        lines=(
            Line(metric="actor/grad_norm", label="policy"),
            Line(metric="critic/grad_norm", label="critic"),
        ),
        picture=True,
    ),
    Panel(
        key="lr",
        section=LEARNING,
        title="Learning rate",
        unit="per optimizer step",
        lines=(Line(metric="actor/lr", label="policy"), Line(metric="critic/lr", label="critic")),
        picture=True,
    ),
    Panel(
        key="phases",
        section=PHASES,
        title="Time by phase",
        unit="seconds",
        kind="stacked",
        help="Wall time of each phase of a step. Phases may overlap: their sum may exceed the step (line).",
        lines=(
            Line(metric="timing_s/step", label="step"),
            Line(metric=f"timing_s/((?!{BESIDE_A_STEP}).*)", label="{}"),
        ),
        picture=True,
    ),
    Panel(
        key="step_time",
        section=PHASES,
        title="Time of a step",
        unit="seconds",
        lines=(Line(metric="timing_s/step", label="step"),),
    ),
    Panel(
        key="throughput",
        section=PHASES,
        title="Throughput",
        unit="tokens per second and device",
        help="Prompt and response tokens, over all devices, those of rollout too.",
        lines=(Line(metric="perf/throughput", label="throughput"),),
        picture=True,
    ),
    Panel(
        key="tokens",
        section=PHASES,
        title="Tokens of a step",
        unit="tokens",
        lines=(Line(metric="perf/total_num_tokens", label="tokens"),),
    ),
    Panel(
        key="wait",
        section=PHASES,
        title="Waiting for samples, and handing out weights",
        unit="seconds",
        lines=(
            Line(metric="timing_s/gen", label="samples"),
            Line(metric="timing_s/update_weights", label="weights"),
        ),
    ),
    Panel(
        key="between",
        section=PHASES,
        title="Between two steps",
        unit="seconds",
        lines=(
            Line(metric="timing_s/testing", label="validation", markers=True),
            Line(metric="timing_s/save_checkpoint", label="checkpoint", markers=True),
        ),
    ),
    Panel(
        key="controller",
        section=PHASES,
        title="The controller's own share",
        unit="share of the step",
        help="Wall time in which no call to a worker was under way.",
        lines=(Line(metric="perf/controller_share", label="share"),),
    ),
    Panel(
        key="replicas",
        section=PHASES,
        title="Replicas",
        unit="replicas",
        lines=(
            Line(metric="rollout/replicas_up", label="up"),
            Line(metric="training/replica_restarts", label="restarts so far"),
        ),
    ),
    Panel(
        key="staleness",
        section=OFF_POLICY,
        title="Staleness of samples",
        unit="weight versions",
        help="Publishes between a group's oldest version and the newest, when it was trained on.",
        lines=(spread("training/off_policy/trajectory_staleness", "mean"),),
        picture=True,
    ),
    Panel(
        key="spans",
        section=OFF_POLICY,
        title="Versions a sample was generated on",
        unit="weight versions",
        help="1 = no load came in between.",
        lines=(spread("training/off_policy/trajectory_spans", "mean"),),
        picture=True,
    ),
    Panel(
        key="evicted",
        section=OFF_POLICY,
        title="Evicted samples",
        unit="samples per batch",
        lines=(Line(metric="training/off_policy/evicted_samples/(.*)", label="{}"),),
    ),
    Panel(
        key="rollout_diff",
        section=OFF_POLICY,
        title="Rollout against the policy",
        unit="difference of probabilities",
        log=True,
        help="What rollout sampled a token with, and what the policy recomputes.",
        lines=(
            Line(metric="training/rollout_probs_diff_mean", label="mean"),
            Line(metric="training/rollout_probs_diff_max", label="max"),
        ),
    ),
    Panel(
        key="rollout_kl",
        section=OFF_POLICY,
        title="KL of rollout from the policy",
        unit="nats per token",
        lines=(
            Line(metric="rollout_corr/kl", label="k1"),
            Line(metric="rollout_corr/k3_kl", label="k3"),
        ),
    ),
    Panel(
        key="importance",
        section=OFF_POLICY,
        title="Importance weights",
        unit="share",
        lines=(
            Line(metric="training/rollout_is/ess", label="effective sample size"),
            Line(metric="training/rollout_is/clipfrac", label="truncated"),
        ),
    ),
    Panel(
        key="store_bytes",
        section=STORE,
        title="Bytes in the store",
        unit="MiB",
        help="Objects, and the memory that holds them.",
        lines=(
            Line(metric="store/object_bytes", label="objects", scale=MIB),
            Line(metric="store/held_bytes", label="memory", scale=MIB),
        ),
    ),
    Panel(
        key="store_moved",
        section=STORE,
        title="Bytes moved in a step",
        unit="MiB",
        kind="growth",
        lines=(
            Line(metric="store/bytes_in", label="put", scale=MIB),
            Line(metric="store/bytes_mapped", label="mapped", scale=MIB),
            Line(metric="store/bytes_copied", label="copied", scale=MIB),
            Line(metric="store/bytes_out", label="sent", scale=MIB),
        ),
    ),
    Panel(
        key="store_objects",
        section=STORE,
        title="Objects in the store",
        unit="objects",
        lines=(
            Line(metric="store/objects", label="objects"),
            Line(metric="store/live_slots", label="slots in use"),
        ),
    ),
    Panel(
        key="store_segments",
        section=STORE,
        title="Memory segments",
        unit="segments",
        lines=(
            Line(metric="store/segments", label="all"),
            Line(metric="store/idle_segments", label="idle"),
        ),
    ),
    Panel(
        key="store_gets",
        section=STORE,
        title="Reads in a step",
        unit="reads",
        kind="growth",
        lines=(
            Line(metric="store/gets", label="all"),
            Line(metric="store/gets_shared", label="through shared memory"),
        ),
    ),
    Panel(
        key="leases",
        section=STORE,
        title="Leases",
        unit="leases",
        lines=(
            Line(metric="store/leases", label="held"),
            Line(metric="store/deferred_deletions", label="deletions that wait"),
        ),
    ),
    Panel(
        key="update_weights",
        section=STORE,
        title="Time spent on weights",
        unit="seconds",
        help="Publishing and, unless replicas pull by themselves, loading.",
        lines=(Line(metric="timing_s/update_weights", label="update_weights"),),
    ),
    Panel(
        key="weights",
        section=STORE,
        title="Weights",
        unit="value",
        lines=(Line(metric="weights/(.*)", label="{}"),),
    ),
)


def panels_of(runs: Sequence[RunData]) -> list[Panel]:
    """The panels of which at least one run has a metric, its patterns replaced by the names that match."""
    names = sorted(
        {
            name
            for run in runs
            for name, curve in run.curves.items()
            if any(map(math.isfinite, curve.values()))
        }
    )
    found = []
    for panel in PANELS:
        lines = tuple(line for pattern in panel.lines for line in lines_of(pattern, names))
        if lines:
            found.append(replace(panel, lines=lines))
    return found


def lines_of(pattern: Line, names: Iterable[str]) -> list[Line]:
    """A line for each name that matches. What all begin with, up to a slash, is left out of their labels."""
    compiled = re.compile(pattern.metric)
    matches = [match for name in names if (match := compiled.fullmatch(name))]
    if not compiled.groups:
        return [pattern] if matches else []
    rest = [match[1].split("/") for match in matches]
    while rest and all(len(parts) > 1 and parts[0] == rest[0][0] for parts in rest):
        rest = [parts[1:] for parts in rest]
    return [
        replace(pattern, metric=match[0], label=pattern.label.format("/".join(parts)))
        for match, parts in zip(matches, rest, strict=True)
    ]
