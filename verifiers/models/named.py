"""Who says how good an answer is, by name: a reward model, a rule in a file, a served judge."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.types import Score
from agentrl.verifiers.base import Submission, Verifier
from agentrl.verifiers.models.constitution import Constitution, open_judge_policy, read_constitution
from agentrl.verifiers.models.heads import ByHeads, clipped, sigmoid
from agentrl.verifiers.models.judge import Criterion, asks, rubric
from agentrl.verifiers.models.reward_model import RewardModel
from agentrl.verifiers.models.served_reward import ServedReward, is_address

_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}(/v\d+)?")
HELPFUL = Criterion("helpful", "How well does the answer do what the task asks, truthfully?")


def named_reward(name: str, clip: float = 0.0) -> Verifier:
    """The verifier of a name; equal names share one, so a model is loaded once and gradings share
    batches. An address shares one as long as its version is the same.

    Args:
        name: a reward model (`reward_model`); `path/to/file.py:function` with `function(prompt:
            str, answer: str) -> float`; `openai:MODEL@URL`, which judges from 0 to 1 by `HELPFUL`;
            or a `constitution.toml`, by its own principles.
        clip: of reward models: rewards are the model's own numbers held to [-clip, clip]; 0: their
            sigmoid.

    Raises:
        ConfigError: there is no such model or rule.
    """
    return _shared(name, clip, depends_on(name))


def depends_on(name: str) -> str:
    """What scores depend on besides a name: the version behind an address, or the digest of a
    rubric; empty for others.
    """
    if is_address(name):
        return ServedReward(name).depends_on
    found = None if rule_of(name) else constitution_of(name)
    return f"rubric {found.digest}" if found else ""


@cache
def _shared(name: str, clip: float, mark: str) -> Verifier:
    """Another mark is another verifier: of another version, or by an edited file."""
    if rule := rule_of(name):
        return _by_rule(load_rule(*rule))
    if found := constitution_of(name):
        return rubric(asks(open_judge_policy(found)), found.principles)
    return reward_model(name, bound=clipped(-clip, clip) if clip else sigmoid)


def constitution_of(name: str) -> Constitution | None:
    """The constitution of a TOML file, or `HELPFUL` alone of `openai:MODEL@URL`; None for other
    names.

    Raises:
        ConfigError: the file is no constitution.
    """
    if name.startswith("openai:"):
        return Constitution(name, (HELPFUL,))
    return read_constitution(name) if name.endswith(".toml") else None


def reward_model(name: str, **rule: Any) -> ByHeads:
    """A reward model in a folder, or one that is served at `http://HOST:PORT`, with `/vN` behind it
    for version N.

    Args:
        rule: `bound`, `combine` and `std_weight`, as in `ByHeads`.

    Raises:
        ConfigError: there is none.
    """
    if is_address(name):
        return ServedReward(name, **rule)
    if _ADDRESS.fullmatch(name):
        raise ConfigError(f"reward model {name!r}: write http://{name}")
    if (Path(name) / "versions").is_dir():
        raise ConfigError(
            f"{name} is a store of reward models: serve it by `agentrl reward serve {name}`, and"
            " give the address"
        )
    return RewardModel.load(name, **rule)


def rule_of(name: str) -> tuple[Path, str] | None:
    """File and function of `path/to/file.py:function`; None for what is no rule in a file.

    Raises:
        ConfigError: it names a file alone.
    """
    file, _, function = name.rpartition(":")
    if file.endswith(".py") and function:
        return Path(file), function
    if file.endswith(".py") or name.endswith(".py"):
        raise ConfigError(
            f"judge {name!r} names no function: write path/to/file.py:function, with"
            " function(prompt: str, answer: str) -> float"
        )
    return None


def load_rule(path: Path, name: str) -> Callable[[str, str], float]:
    """A function of prompt and answer in a file.

    Raises:
        ConfigError: there is no such file, it cannot be loaded, or it has no such function.
    """
    where = f"judge {path}:{name}"
    spec = importlib.util.spec_from_file_location(_module(path), path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: there is no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{where}: the file cannot be loaded ({type(error).__name__}: {why})"
        ) from error
    found: Callable[[str, str], float] | None = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{where}: the file has no function {name!r}")
    try:
        inspect.signature(found).bind("a prompt", "an answer")
    except TypeError as error:
        raise ConfigError(
            f"{where}: it cannot be called with a prompt and an answer ({error}): write def"
            f" {name}(prompt: str, answer: str) -> float"
        ) from error
    except ValueError:  # a function of C without a signature is taken at its word
        pass
    return found


def _module(path: Path) -> str:
    """A name in `sys.modules` that no other module has."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    return f"agentrl_rule_{path.stem}_{digest}"


def _by_rule(rule: Callable[[str, str], float]) -> Verifier:
    async def verify(submission: Submission, /) -> Score:
        prompt = next(one.content for one in reversed(submission.messages) if one.role == "user")
        return Score(float(rule(prompt, submission.answer)), {}, "scored by a rule")

    return verify
