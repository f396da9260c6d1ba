"""Policies by name: `oracle`, `noop`, `hf:MODEL`, `vllm:MODEL`, `openai:MODEL@URL`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.dialogue import Dialogue, PolicyUser
from agentrl.engines.base import Sampling
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.policies.base import Policy, Scripted, TokenPolicy, noop
from agentrl.policies.served import OPENAI_URL, Prices, ServedPolicy

if TYPE_CHECKING:
    from agentrl.chat.settings import ChatSettings
    from agentrl.chat.tokens import Chat
    from agentrl.evaluation.run import EvalPlan

POLICIES = "oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL"
_SPEAKING = "hf:MODEL, vllm:MODEL or openai:MODEL@URL"
LOADED = ("hf", "vllm")
"""Kinds of policies whose model is loaded here."""
_BARE_ADDRESS = re.compile(r"^localhost\b|:\d{2,5}(/|$)|/v1/?$")


def open_policy(plan: EvalPlan, env: ToolEnv) -> Policy:
    """The policy behind a name such as `oracle` or `hf:MODEL`, a folder or a name on the hub.

    Raises:
        ConfigError: unknown name, or a model that cannot be used.
        TemplateError: the model's chat template cannot carry exact tokens.
    """
    kind, _, path = plan.policy.partition(":")
    if plan.policy == "oracle":
        return Scripted("oracle", env.oracle_actions)
    if plan.policy == "noop":
        return noop()
    if kind in LOADED and path:
        return _loaded_policy(kind, path, plan, env.limits.turn_tokens)
    if kind == "openai":
        return _served_policy(path, plan)
    raise ConfigError(f"--policy {plan.policy!r} is unknown: use {POLICIES}")


def open_user(plan: EvalPlan, env: ToolEnv) -> PolicyUser | None:
    """The policy that speaks for the user of a dialogue; None where its own user does.

    Raises:
        ConfigError: the environment is no dialogue, or the policy cannot speak.
    """
    if not plan.user:
        return None
    if not isinstance(env, Dialogue):
        raise ConfigError(
            f"--user {plan.user} goes with a dialogue, and {env.id} has no user: derive it from"
            " agentrl.Dialogue"
        )
    if plan.user in ("oracle", "noop"):
        raise ConfigError(f"--user {plan.user!r} says nothing: use {_SPEAKING}")
    return PolicyUser(open_policy(replace(plan, policy=plan.user), env))


def with_user(make: Callable[[], ToolEnv], user: PolicyUser | None) -> Callable[[], ToolEnv]:
    """What builds the same environment with another user; the same where there is none."""
    if user is None:
        return make

    def built() -> ToolEnv:
        env = make()
        assert isinstance(env, Dialogue)
        env.user = user
        return env

    return built


async def close_policy(policy: Policy) -> None:
    """End the engine's thread or the connections of a policy of `open_policy`, on the loop where it
    played.
    """
    if isinstance(policy, TokenPolicy):
        await policy.engine.close()
    elif isinstance(policy, ServedPolicy):
        await policy.close()


def _served_policy(address: str, plan: EvalPlan) -> Policy:
    """The policy of `MODEL@URL`; without an address it is the official server."""
    model, at, url = address.rpartition("@")
    if at and "://" not in url and not _BARE_ADDRESS.search(url):  # an @ of the model's own name
        model, at = address, ""
    prices = Prices(*plan.prices) if plan.prices else None
    shape = {"top_p": plan.top_p} if plan.top_p < 1 else {}
    shape |= {"top_k": plan.top_k} if plan.top_k else {}
    return ServedPolicy(
        model if at else address,
        url if at else OPENAI_URL,
        "",
        plan.temperature,
        prices,
        plan.served.model_copy(update=shape) if shape else plan.served,
    )


def chat_of(policy: str, settings: ChatSettings) -> Chat:
    """How the model of an `hf:` or `vllm:` policy reads messages; no weights are loaded.

    Raises:
        ConfigError: a model that cannot be used.
        TemplateError: its chat template cannot carry exact tokens.
    """
    try:
        from agentrl.engines.factory import open_chat
    except ImportError as error:
        raise ConfigError(
            f"--policy {policy} needs torch and transformers: pip install 'agentrl[train]'"
        ) from error
    return open_chat(policy.partition(":")[2], settings)


def _loaded_policy(kind: str, model: str, plan: EvalPlan, turn_tokens: int) -> Policy:
    chat = chat_of(plan.policy, plan.chat)
    from agentrl.engines.factory import open_engine, open_vllm
    from agentrl.engines.loading import best_device, load_model

    if kind == "vllm":
        engine = open_vllm(model, chat, plan.engine, plan.out and plan.out / "engine.log")
    else:
        engine = open_engine(load_model(model, best_device()), chat)
    sampling = Sampling(plan.temperature, plan.top_p, plan.top_k, turn_tokens)
    return TokenPolicy(engine, chat, sampling, name=plan.policy)
