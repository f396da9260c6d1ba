"""Do sampler and trainer agree? The gap between them is measured every round; a probe after every
load shows whether the engine has followed; a gap that rounding does not explain stops the run.

The gap is |log π_trainer - log π_sampler| of sampled tokens before an update moves the trainer.

For the probe the engine answers one prompt with the same seeds after every load, by the ordinary
`generate`, and the trainer scores its answers. Both must agree, and the engine must have moved
where the trainer moved: one that keeps older weights, or a prefix cache made with them, answers as
before.

Letters: B rows, T positions, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.engines.base import Generation, Restarted, Sampling
from agentrl.engines.loading import dropouts
from agentrl.engines.routing import replayed_routing, routers_of
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout.rollouts import GroupStream
from agentrl.trainers.algorithms.losses import MAX_LOG_RATIO
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trajectory import Episode, EpisodeKey, Group, Segment, Trajectory
from agentrl.types import EndReason, Score, TaskView

Cause = Literal["stale weights", "dropout", "disagreement", "off-policy"]

STOP_GAP = 0.1
"""Mean gap (nats per token) that stops a run."""
MOST_CUT = 0.002
"""Share of a round's first trained tokens that the recipe may cut before the policy has moved."""
WARN_EFFECTIVE = 0.5
"""Effective sample size, as a share of the tokens, below which a run is warned."""
ANSWERS, ANSWER_TOKENS = 4, 16
"""Number of answers that the probe compares, and their length."""
CALM_ROWS = 16
"""Rows that are scored again without dropout to tell its part of a gap."""


class ParityError(TrainingError):
    """Sampler and trainer disagree, so nothing was trained."""


class Disagreement(NamedTuple):
    """What is wrong, whether training must stop, and a sentence."""

    cause: Cause
    stops: bool
    message: str


class Tokens(NamedTuple):
    """Trained tokens of a (micro-)batch: three log-probabilities and a weight each."""

    trainer_N: Tensor
    sampler_N: Tensor
    anchor_N: Tensor
    weights_N: Tensor


def check_sampling(sampling: Sampling, temperature: float) -> None:
    """Refuse a sampler whose distribution the scorer cannot reproduce.

    Engines do not report which tokens top-p or top-k cut, and what was cut has probability 0.

    Raises:
        ConfigError: greedy or truncated sampling, or another temperature than the scorer's.
    """
    if sampling.temperature == 0:
        raise ConfigError(
            "temperature=0 samples greedily, so there is nothing to learn from: use temperature=1"
        )
    for name, value, whole in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != whole:
            raise ConfigError(
                f"{name}={value} truncates the distribution that is sampled, and the trainer scores"
                f" the whole one: use {name}={whole}"
            )
    if sampling.temperature != temperature:
        raise ConfigError(
            f"the sampler's temperature={sampling.temperature} is not the scorer's"
            f" temperature={temperature}: give both the same"
        )


def trained_tokens(output: PolicyOutput, batch: TokenBatch) -> Tokens:
    """Gather what gaps and ratios are computed from, detached: 32 bytes per trained token."""
    mask_BT = batch.mask_BT
    weights_BT = (
        torch.ones_like(batch.old_logprobs_BT) if batch.weights_BT is None else batch.weights_BT
    )
    columns = (output.logprobs_BT.detach(), batch.old_logprobs_BT, batch.anchor_BT, weights_BT)
    return Tokens(*(column_BT.to(mask_BT.device)[mask_BT].double() for column_BT in columns))


def gap_metrics(parts: Sequence[Tokens]) -> dict[str, float]:
    """`parity/gap_mean`, `_p99`, `_max` (nats) and `parity/kl`, k3 of KL(sampler‖trainer).

    Args:
        parts: of the first optimizer step after sampling; later steps also contain what training
            moved.

    Returns:
        nothing if there are no tokens.
    """
    joined = _joined(parts)
    if joined is None:
        return {}
    log_ratio_N = joined.trainer_N - joined.sampler_N
    gap_N = log_ratio_N.abs()
    kl_N = torch.expm1(log_ratio_N.clamp(max=MAX_LOG_RATIO)) - log_ratio_N
    return {
        "parity/gap_mean": float(gap_N.mean()),
        "parity/gap_p99": quantile(gap_N, 0.99),
        "parity/gap_max": float(gap_N.max()),
        "parity/kl": float(kl_N.mean()),
    }


def ratio_metrics(parts: Sequence[Tokens]) -> dict[str, float]:
    """Quantiles and effective sample size of the ratio, before and after corrections.

    Raw is π/π_sampler. Corrected is what a token's gradient is multiplied by before any clip: its
    weight times π/π_anchor; without corrections it is the raw one. Log-ratios are cut at ±20.
    """
    joined = _joined(parts)
    if joined is None:
        return {}
    trainer_N, sampler_N, anchor_N, weights_N = joined
    ratios = {
        "raw": (trainer_N - sampler_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
        "corrected": (trainer_N - anchor_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * weights_N,
    }
    metrics = {}
    for name, ratio_N in ratios.items():
        for share in (0.01, 0.5, 0.99):
            metrics[f"ratio/{name}_p{round(100 * share):02d}"] = quantile(ratio_N, share)
        metrics[f"ratio/{name}_effective"] = effective_share(ratio_N)
    return metrics


def _joined(parts: Sequence[Tokens]) -> Tokens | None:
    """Join the tokens of all parts; None if there are none."""
    if not sum(len(part.trainer_N) for part in parts):
        return None
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def effective_share(weights_N: Tensor) -> float:
    """Kish's effective sample size over the sample size, (Σw)²/(NΣw²); 0 if no weight is left.

    Kish, Survey Sampling, 1965; the formula is at https://en.wikipedia.org/wiki/Effective_sample_size.
    """
    square = float(weights_N.square().sum())
    return float(weights_N.sum()) ** 2 / (len(weights_N) * square) if square else 0.0


def quantile(values_N: Tensor, share: float) -> float:
    """Return the nearest value at that rank (`torch.quantile` refuses more than 16 million)."""
    return float(values_N.sort().values[round(share * (len(values_N) - 1))])


def largest_gap(model: Any) -> float:
    """Return the mean gap (nats per token) that rounding explains in the model's dtype."""
    dtype = getattr(model, "computes_in", None) or next(model.parameters()).dtype
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.02


def judge_gap(
    model: Any,
    batch: TokenBatch,
    metrics: dict[str, float],
    temperature: float,
    probed: float = torch.inf,
) -> list[Disagreement]:
    """Say what is wrong with a gap; an empty list if nothing is.

    A gap is too wide if rounding does not explain it, or if it alone makes the recipe cut tokens.
    With dropout asked for, the gap without it is judged instead, as the sampler drops nothing.

    Args:
        model: the trainer's, with the weights that sampling should have used.
        batch: sampled tokens with the sampler's log-probabilities.
        metrics: of `gap_metrics`, and `parity/cut`; what is absent is not judged.
        temperature: of the scorer.
        probed: mean gap of the last probe of the same weights.
    """
    gap, cut = metrics.get("parity/gap_mean", 0.0), metrics.get("parity/cut", 0.0)
    widest = largest_gap(model)
    if gap <= widest and cut <= MOST_CUT:
        return []
    cause: Cause = "disagreement"
    calm = _gap_without_dropout(model, batch, temperature) if model.training else gap
    if calm < gap / 2 and calm <= widest:
        cause = "dropout"
        advice = f"{calm:.2g} are left without dropout, which sampling never has"
        advice += ": set compute.dropout=0"
    elif probed <= widest:
        advice = (
            "on its probe the engine agrees, so it did not read these rows: look at them with"
            " `agentrl view`, and check the chat template with `agentrl check hf:MODEL`"
        )
    else:
        advice = "check that the engine has the trainer's weights, dtype, temperature and template"
    if batch.experts_BTLK is None and routers_of(model):
        advice += "; near ties are enough in a mixture of experts: try engine.routing='replay'"
    judged = calm if any(dropouts(model.config)) else gap
    words = f"{cause}: sampler and trainer disagree by {gap:.3g} nats per token"
    if cut > MOST_CUT:
        words += f", for which alone the recipe cuts {cut:.2g} of the tokens"
    # "not <=", so that NaN stops the run
    return [Disagreement(cause, not judged <= STOP_GAP, f"{words}; {advice}")]


def judge_ratios(metrics: dict[str, float]) -> list[Disagreement]:
    """Say whether few tokens carry all the weight in `ratio_metrics`."""
    effective = metrics.get("ratio/corrected_effective", 1.0)
    if effective >= WARN_EFFECTIVE:
        return []
    words = f"off-policy: {effective:.0%} of the tokens carry all of the weight"
    return [Disagreement("off-policy", False, f"{words}: train on fresher samples")]


def _gap_without_dropout(model: Any, batch: TokenBatch, temperature: float) -> float:
    trained_B = batch.mask_BT.any(1).nonzero()[:CALM_ROWS, 0]
    rows = batch.rows(trained_B)
    calm_BT = _scores(model, rows, temperature)
    return float((calm_BT - rows.old_logprobs_BT)[rows.mask_BT].double().abs().mean())


class ParityCheck:
    """Watches that an engine samples with the trainer's weights.

    Args:
        model: the trainer's.
        engine: the sampler; one that is `Restarted` is probed again after a restart.
        rollouts: that the engine plays for.
        prompt_ids: the prompt of the probe.
        sampling: of the rollouts; its temperature must be the scorer's.
        warn: called with a sentence, once for each cause.

    Raises:
        ConfigError: the sampler's distribution is not the one that is scored.
    """

    def __init__(
        self,
        model: Any,
        engine: object,
        rollouts: GroupStream,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        warn: Callable[[str], None],
    ) -> None:
        check_sampling(sampling, sampling.temperature)
        self._model, self._engine, self._rollouts, self._warn = model, engine, rollouts, warn
        self._prompt_ids, self._temperature = tuple(prompt_ids), sampling.temperature
        self._before: ParityProbe | None = None
        self._probed_gap = float("inf")
        self._restarts = 0
        self._warned: set[Cause] = set()

    def confirm(self, version: int) -> dict[str, float]:
        """Probe the engine after a load: `parity/probe_gap`, `_moved` and `_followed`.

        It compares with the last probe since which the trainer has moved by more than rounding:
        smaller steps add up until they can be measured.

        Raises:
            ParityError: the engine samples with other weights.
        """
        self._restarts = self._restart_count
        answers = self._ask()
        batch = pack_answers(self._prompt_ids, answers)
        now = ParityProbe(batch, _scores(self._model, batch, self._temperature))
        gap = gap_metrics([trained_tokens(PolicyOutput(now.trainer_BT), batch)])
        metrics, wrong = {"parity/probe_gap": gap["parity/gap_mean"]}, list[Disagreement]()
        other_versions = sorted({answer.version for answer in answers} - {version})
        if other_versions:
            words = f"it samples with version {other_versions[0]} after {version} was loaded"
            wrong.append(_stale(words))
        before = self._before
        if before is not None:
            trainer_BT = _scores(self._model, before.batch, self._temperature)
            trainer, engine, noise = distances(before, trainer_BT, now)
            metrics["parity/probe_moved"] = trainer
            if trainer <= max(4 * noise, 1e-5):
                now = before
            elif engine < float("inf"):
                metrics["parity/probe_followed"] = engine / trainer
                if engine < trainer / 2:
                    moved = f"the trainer moved by {trainer:.2g} nats and the engine by"
                    wrong.append(_stale(f"on a fixed prompt {moved} {engine:.2g}"))
        self._before, self._probed_gap = now, gap["parity/gap_mean"]
        self._report([*wrong, *judge_gap(self._model, batch, gap, self._temperature)])
        return metrics

    def confirm_if_restarted(self, version: int) -> None:
        """Probe the engine before anything is learned if its process was restarted meanwhile."""
        if self._restart_count != self._restarts:
            self.confirm(version)

    def judge_gap(self, gap: dict[str, float], mini: TokenBatch) -> None:
        """Judge the gap before a round's first update.

        Raises:
            ParityError: it is too wide.
        """
        self._report(judge_gap(self._model, mini, gap, self._temperature, self._probed_gap))

    def judge_ratios(self, ratios: dict[str, float]) -> None:
        """Warn if few tokens carry all the weight."""
        self._report(judge_ratios(ratios))

    @property
    def _restart_count(self) -> int:
        return self._engine.restarts if isinstance(self._engine, Restarted) else 0

    def _ask(self) -> tuple[Generation, ...]:
        sampling = Sampling(temperature=self._temperature, max_tokens=ANSWER_TOKENS)
        return self._rollouts.probe(self._prompt_ids, sampling, range(ANSWERS))

    def _report(self, wrong: Sequence[Disagreement]) -> None:
        """Raise what stops the run; warn of the rest, once for each cause."""
        for disagreement in wrong:
            if disagreement.stops:
                raise ParityError(disagreement.message)
        for disagreement in wrong:
            if disagreement.cause not in self._warned:
                self._warned.add(disagreement.cause)
                self._warn(disagreement.message)


@dataclass(frozen=True, eq=False)
class ParityProbe:
    """The engine's answers with its log-probabilities (`old_logprobs_BT`), and the trainer's."""

    batch: TokenBatch
    trainer_BT: Tensor


def distances(
    before: ParityProbe, trainer_BT: Tensor, now: ParityProbe
) -> tuple[float, float, float]:
    """Measure how far trainer and engine moved on the tokens that both probes have in common.

    Args:
        before: the earlier probe.
        trainer_BT: the trainer's present log-probabilities of the earlier probe's tokens.
        now: the later probe.

    Returns:
        Root mean squares (nats): of the trainer's change; of the engine's, infinite if it draws
        other tokens from the start; of the distance between both at the earlier probe.
    """
    width = min(before.batch.ids_BT.shape[1], now.batch.ids_BT.shape[1])
    same_BT = before.batch.ids_BT[:, :width] == now.batch.ids_BT[:, :width]
    both_BT = before.batch.mask_BT[:, :width] & now.batch.mask_BT[:, :width]
    # Behind the first token that differs, the same id stands in another context.
    common_BT = both_BT & same_BT.int().cumprod(1).bool()
    mask_BT, engine = before.batch.mask_BT, float("inf")
    if common_BT.any():
        change_BT = now.batch.old_logprobs_BT[:, :width] - before.batch.old_logprobs_BT[:, :width]
        engine = _rms(change_BT[common_BT])
        mask_BT = torch.nn.functional.pad(common_BT, (0, mask_BT.shape[1] - width))
    trainer = _rms((trainer_BT - before.trainer_BT)[mask_BT])
    noise = _rms((before.batch.old_logprobs_BT - before.trainer_BT)[before.batch.mask_BT])
    return trainer, engine, noise


def pack_answers(prompt_ids: Sequence[int], answers: Sequence[Generation]) -> TokenBatch:
    """Pack answers as rows, in the way of every episode."""
    prompt, task = Segment.prompt(prompt_ids), TaskView(id="probe", instruction="probe")
    episodes = list[Episode]()
    for index, answer in enumerate(answers):
        sampled = Segment.sampled(answer.ids, answer.logprobs, answer.version, answer.finish)
        branch = Trajectory((prompt, sampled)).routed(answer.per_token.get("routing"))
        key, end = EpisodeKey("probe", 0, "probe", index), EndReason.ANSWERED
        episodes.append(Episode(key, "probe", task, "", (), end, Score(0.0), (branch,)))
    return pack([Group(tuple(episodes))], pad_id=0)


def _scores(model: Any, batch: TokenBatch, temperature: float) -> Tensor:
    """Log-probabilities as updates compute them, without dropout."""
    was_training = model.training
    model.eval()
    try:
        with replayed_routing(model, batch.experts_BTLK):
            logprobs_BT = frozen_logprobs(model, batch.to(model.device), temperature)
        return logprobs_BT.to(batch.mask_BT.device)
    finally:
        model.train(was_training)


def _stale(words: str) -> Disagreement:
    message = f"stale weights: the engine keeps older weights: {words}: load it after every update"
    return Disagreement("stale weights", True, message)


def _rms(values_N: Tensor) -> float:
    return float(values_N.double().square().mean().sqrt())
