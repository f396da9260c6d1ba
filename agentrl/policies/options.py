"""Options of a served model: rate limits, budgets and sampling."""

from __future__ import annotations

import difflib
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from agentrl.errors import ConfigError
from agentrl.settings import STRICT

OURS = (
    *("messages", "model", "tools", "stream", "n", "seed", "logprobs", "return_token_ids"),
    *("max_completion_tokens", "max_tokens", "temperature"),
)
"""Parameters of a request that the player sets."""


class ServedOptions(BaseModel):
    """Options of a served model. Any other name is a parameter of the request.

    So `ServedOptions(timeout_s=30, top_p=0.9)` sends `top_p` to the server, whatever it knows.
    """

    model_config = STRICT | ConfigDict(extra="allow")

    timeout_s: float = Field(default=60.0, gt=0)
    """Maximum duration of one try in seconds."""
    retries: int = Field(default=2, ge=0)
    """Number of retries after a broken connection, silence, or an answer 408, 409, 429 or 5xx."""
    patience_s: float = Field(default=120.0, ge=0)
    """Maximum total wait of one turn, in seconds, when the server asks for it (Retry-After). These
    waits do not count as tries."""
    concurrency: int = Field(default=0, ge=0)
    """Maximum number of simultaneous requests (0 = one per episode)."""
    requests_per_minute: int = Field(default=0, ge=0)
    """Maximum number of tries in any 60 s (0 = no limit)."""
    tokens_per_minute: int = Field(default=0, ge=0)
    """Maximum number of tokens in any 60 s, prompts included, estimated before a try and corrected
    after it (0 = no limit)."""
    budget_tokens: int = Field(default=0, ge=0)
    """Start no further episode once this many tokens are spent (0 = no limit)."""
    budget_usd: float = Field(default=0.0, ge=0)
    """Start no further episode once this many US dollars are spent; needs prices (0 = no limit)."""
    tokens: bool = False
    """Ask for token ids and log-probabilities (vLLM, SGLang), so that episodes can be packed for
    training."""
    send_reasoning: bool = False
    """Send the reasoning of earlier turns back, as `reasoning_content`."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in self.sampling:
            if name in OURS:
                raise ValueError(f"{name} is decided by the episode or an option of its own")
            near = difflib.get_close_matches(name, type(self).model_fields, n=1, cutoff=0.85)
            if near:
                raise ValueError(f"{name} is no option of a served model: {near[0]} is")
        return self

    @property
    def sampling(self) -> dict[str, JsonValue]:
        """The parameters that are passed on in every request."""
        return dict(self.model_extra or {})

    @property
    def decisive(self) -> dict[str, JsonValue]:
        """The parameters that a score depends on."""
        return self.sampling | ({"send_reasoning": True} if self.send_reasoning else {})

    @classmethod
    def read(cls, row: dict[str, Any], option: str) -> Self:
        """From the values of a command's option.

        Raises:
            ConfigError: one sentence with the option, the value and what is wrong with it.
        """
        try:
            return cls.model_validate(row)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            said = problem["msg"].removeprefix("Value error, ")
            field = ".".join(map(str, problem["loc"]))
            where = f" {field}={problem['input']}" if field else ""
            raise ConfigError(f"{option}{where}: {said[0].lower()}{said[1:]}") from None
