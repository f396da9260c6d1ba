"""Where a recipe differs from the paper that it is named after, and why.

A row without an entry differs in nothing that is known. Each entry is held by a test: what one
step's numbers show, by the papers' formulas (`tests/support/paper_differs.py`), the rest by a check
each (`tests/trainers/algorithms/test_deviations.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any


@dataclass(frozen=True)
class Deviation:
    """One difference.

    Attributes:
        name: says it in a word.
        differs: what the paper has, and what is here.
        why: the reason.
        settings: of the recipe, that give the paper's form; empty: there are none.
    """

    name: str
    differs: str
    why: str
    settings: dict[str, Any] = field(default_factory=dict)


RATIO = Deviation(
    "ratio",
    "the paper steps once on -A·log π; here the step is on -ρA",
    "the gradients are the same at a round's first step, and ρ keeps later ones right",
    {"surrogate": "policy_gradient"},
)
TOKEN_CLIP = Deviation(
    "token_clip",
    "the paper steps on -A·log π; here the step is on -ρA with PPO's clip on every token",
    "the gradients are the same at a round's first step, and the clip bounds later ones",
    {"surrogate": "policy_gradient"},
)

CONSTANT_NORM = Deviation(
    "constant_norm",
    "the paper sums over an answer's tokens; here the sum is divided by norm_tokens = 4096",
    "so that a learning rate is in the range of other rows",
    {"aggregate": "episode_sum"},
)
ONE_MEAN = Deviation(
    "one_mean",
    "the paper's equation has one mean over tokens per prompt; here it is over the step",
    "as its authors' code",
)
WHOLE_STEP = Deviation(
    "whole_step",
    "the paper chooses tokens by the policy as it moves; here once per optimizer step, by the"
    " policy that the round starts from",
    "the choice is the same in every split into micro-batches",
)
PRODUCT = "a product over a long turn leaves the clip at once"
NO_KL_IN_REWARD = Deviation(
    "no_kl_in_reward",
    "the paper takes β·log(π/π_ref) off the reward of every token; here there is no reference",
    "no second model unless it is asked for; 0.01 is an example of β",
    {"kl_reward_coef": 0.01},
)
NO_KL_LOSS = Deviation(
    "no_kl_loss",
    "the paper adds β·k3 to the loss; here there is no reference",
    "no second model unless it is asked for; 0.01 is an example of β",
    {"kl_coef": 0.01, "kl_ratio": False},
)
NO_DISCOUNT = Deviation(
    "no_discount",
    "the paper discounts by 0.99; here gamma is 1",
    "its steps are those of games and robots; a turn of a hundred tokens would be worth a third",
    {"gamma": 0.99},
)
NO_ENTROPY_BONUS = Deviation(
    "no_entropy_bonus",
    "the paper's loss has an entropy bonus, and one network for policy and values; here there is no"
    " bonus, and the critic is a model of its own",
    "entropy_coef = 0.01 adds the paper's bonus",
)
VALUE_CLIP = Deviation(
    "value_clip",
    "the paper's value loss is not clipped; here a value moves by at most 0.5 within a round",
    "a critic that forgets a round's start loses the advantages",
    {"critic": {"value_clip": inf}},
)


def whitened(credit: str) -> Deviation:
    """A paper whose advantages are that credit's."""
    return Deviation(
        "whitened",
        "the paper takes GAE as it is; here advantages are whitened over the round",
        "as all code for language models does, so that a learning rate fits any size of reward",
        {"credit": credit},
    )


DEVIATIONS: dict[str, tuple[Deviation, ...]] = {
    "reinforce": (
        Deviation(
            "round_baseline",
            "the paper's baseline is the mean reward of all rounds so far; here that of the other"
            " episodes of the round",
            "it follows the policy, and no state outlives a round",
        ),
        RATIO,
        NO_KL_IN_REWARD,
    ),
    "rloo": (TOKEN_CLIP, NO_KL_IN_REWARD),
    "remax": (
        RATIO,
        Deviation(
            "failed_greedy",
            "the paper knows no failures; here an episode whose greedy sibling failed has an"
            " advantage of 0",
            "there is nothing to compare it with",
        ),
    ),
    "opo": (
        Deviation(
            "ratio",
            RATIO.differs,
            "the gradients are the same at a round's one step",
            RATIO.settings,
        ),
    ),
    "grpo": (
        Deviation(
            "group_std",
            "the paper does not say which deviation; here it is that of the sample (ddof = 1), plus"
            " 1e-6",
            "as verl and TRL; so in every row whose credit is grpo",
        ),
        Deviation(
            "no_kl_loss",
            "the paper adds 0.04·k3 to the loss; here there is no reference",
            "no second model unless it is asked for; without kl_ratio = false the gradient would be"
            " that of KL(π‖π_ref)",
            {"kl_coef": 0.04, "kl_ratio": False},
        ),
    ),
    "dr_grpo": (
        Deviation(
            "norm_tokens",
            "the paper's equation sums over an answer's tokens, its listing divides that by the"
            " budget of tokens; here it is divided by norm_tokens = 4096",
            "an environment's budget is not known to the loss; it scales the loss and nothing else",
            {"norm_tokens": 1},
        ),
    ),
    "dapo": (
        Deviation(
            "no_overlong_punishment",
            "the paper takes up to 1 off the reward of long episodes; here nothing is taken",
            "how long is too long belongs to the environment",
            {"overlong_tokens": 20480, "overlong_cache": 4096},
        ),
        ONE_MEAN,
        Deviation(
            "bounded_refill",
            "the paper samples until all places are taken; here a few times, and places may stay"
            " empty",
            "a policy that solves nothing would play for ever",
        ),
    ),
    "maxrl": (TOKEN_CLIP, CONSTANT_NORM),
    "mgpo": (
        Deviation(
            "mean_reward",
            "the paper's p is the share of correct answers; here the group's mean reward, held to"
            " [0, 1]",
            "rewards need not be 0 and 1; where they are it is the same",
        ),
    ),
    "pass_at_k": (
        Deviation(
            "baseline_of_k",
            "the paper's experiments take the mean best of k - 1 others as baseline; here of k"
            " others, so that a group of at most k says nothing",
            "the advantages of a group sum to 0, and k = 1 is RLOO",
        ),
        TOKEN_CLIP,
        CONSTANT_NORM,
    ),
    "gdpo": (
        Deviation(
            "absent_terms",
            "in the paper every answer has every reward; here a term that a score lacks counts 0"
            " and enters no statistic",
            "verifiers of different tasks name different terms",
        ),
    ),
    "otb": (
        Deviation(
            "others_only",
            "the paper's baseline is over all episodes of the group; here over the others",
            "so it depends on no action of the episode itself, and nothing is biased",
        ),
        Deviation(
            "chosen_logit",
            "the paper's weight of a token is 1 - 2π + Σπ²; here (1 - π)²",
            "it needs the probability of the sampled token alone, and is between that and half of"
            " it",
        ),
        Deviation(
            "ended",
            "in the paper an answer that has ended is in no later baseline; here it counts with its"
            " last token",
            "the last tokens of the longest answer would have no baseline",
        ),
        RATIO,
    ),
    "cispo": (
        Deviation(
            "bounds",
            "the paper gives no number for its upper bound; here it is 1 + 4",
            "as SkyRL and ART; clip_high sets it",
        ),
        Deviation(
            "surrogate_alone",
            "the paper also takes dynamic sampling and the punishment of long answers from DAPO;"
            " here neither",
            "the row is the surrogate",
            {"refill": True, "overlong_tokens": 20480, "overlong_cache": 4096},
        ),
        ONE_MEAN,
    ),
    "topr": (
        Deviation(
            "group_mean",
            "the paper takes rewards of 1 and -1 less a constant; here rewards less their group's"
            " mean",
            "rewards need not be two numbers, and a group without signal teaches nothing",
        ),
    ),
    "dppo": (
        Deviation(
            "as_log",
            "the paper's loss is -ρA; here -ρA·log π with ρ held fixed, and at most 20",
            "the gradient is the same up to that bound, and the loss is no estimate of anything in"
            " either",
        ),
        CONSTANT_NORM,
    ),
    "vespo": (
        Deviation(
            "token_mean",
            "the paper's equation sums an answer's tokens and averages over answers; here the mean"
            " is over tokens",
            "as its authors' code",
            {"aggregate": "episode_sum"},
        ),
        Deviation(
            "bounded_log_w",
            "the paper does not bound the log-ratio of an episode; here it is held to ±20",
            "the weight is 0 long before, and exp does not overflow",
        ),
    ),
    "clip_cov": (
        Deviation(
            "clip_kept",
            "the paper's equation clips by covariance alone; here PPO's clip is beside it",
            "as its authors' code",
            {"surrogate": "importance_weighted"},
        ),
        WHOLE_STEP,
    ),
    "kl_cov": (
        WHOLE_STEP,
        Deviation(
            "rounded_up",
            "the paper does not say how a share of the tokens is rounded; here up",
            "small steps still hold one",
        ),
        Deviation(
            "positive_only",
            "the paper holds the tokens of highest covariance whatever it is; here only where it is"
            " above 0",
            "in a step without signal all are 0, and none of those ties is a reason to hold a"
            " token",
        ),
    ),
    "simko": (
        Deviation(
            "sign_of_advantage",
            "the paper praises correct answers; here those with an advantage above 0",
            "rewards need not be 0 and 1; where they are it is the same",
        ),
        Deviation(
            "step_quantile",
            "the paper's forks are above the quantile of entropy of their answer; here of the step",
            "an answer of certain tokens has no forks",
        ),
        Deviation(
            "entropy_before",
            "its authors' code takes the entropy of the policy as it moves; here that of the policy"
            " that the round starts from",
            "the choice is the same in every split into micro-batches",
        ),
    ),
    "prorl": (
        Deviation(
            "fixed_reset",
            "the paper resets when held-out results stall; here every 200 rounds",
            "a run can be repeated; reset_every sets it",
        ),
        Deviation(
            "kl_ratio",
            "the paper's KL term is k3; here it is ρ·k3",
            "its gradient is that of KL(π‖π_ref)",
            {"kl_ratio": False},
        ),
    ),
    "reinforce++": (NO_KL_IN_REWARD,),
    "reinforce++_baseline": (
        Deviation(
            "no_kl_loss",
            "the paper adds β·k2 to the loss; here there is no reference",
            NO_KL_LOSS.why,
            {"kl_coef": 0.01, "kl_estimator": "k2", "kl_ratio": False},
        ),
    ),
    "turn_grpo": (
        Deviation(
            "turn_returns",
            "the paper adds the z-score of a turn's own reward and that of the outcome; here it is"
            " one z-score, of the return from the turn on",
            "one rule for any number of turns, without a weight between the two",
        ),
        NO_KL_LOSS,
    ),
    "turn_ppo": (
        Deviation(
            "token_ratio",
            "the paper's ratio, clip and mean are of turns; here of tokens",
            PRODUCT,
        ),
        whitened("turn_gae"),
        NO_DISCOUNT,
        Deviation(
            "longer_trace",
            "the paper's λ is 0.9; here 0.95",
            "as in ppo",
            {"lam": 0.9},
        ),
    ),
    "gigpo": (
        Deviation(
            "token_ratio",
            "the paper's ratio and clip are of a turn's whole action, and its mean is over turns;"
            " here they are of tokens, and every episode weighs the same",
            PRODUCT,
        ),
        NO_KL_LOSS,
    ),
    "ppo": (
        whitened("gae"),
        NO_DISCOUNT,
        NO_ENTROPY_BONUS,
        VALUE_CLIP,
    ),
    "ppo_penalty": (
        whitened("gae"),
        NO_DISCOUNT,
        Deviation(
            "sampled_kl",
            "the paper's KL is summed over actions; here it is (ρ - 1 - log ρ) of the sampled one",
            "a vocabulary is too large to sum; in expectation the two are the same",
        ),
        Deviation(
            "bounded_coef",
            "the paper's β has no ends; here it stays from 2⁻²⁰ to 2²⁰",
            "one that was not needed for long would take as long to come back",
        ),
        NO_ENTROPY_BONUS,
        VALUE_CLIP,
    ),
    "vapo": (
        Deviation(
            "floor",
            "the paper's λ = 1 - 1/(αl) is negative for answers of fewer than 1/α tokens; here it"
            " is 0 then",
            "its answers have thousands of tokens, ours may have ten",
        ),
    ),
}
"""Recipe -> its differences."""
