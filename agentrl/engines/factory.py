"""Open the chat and the engine of a model, for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.chat.contract import check_chat
from agentrl.chat.settings import ChatSettings
from agentrl.chat.shipped import template_text
from agentrl.chat.tokens import Chat
from agentrl.engines.base import Engine, EngineSettings
from agentrl.engines.loading import (
    find_model,
    load_config,
    load_tokenizer,
    loaded_engine,
    own_dtype,
    transformers_engine,
)
from agentrl.engines.vllm import refuse_missing
from agentrl.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_chat(model: str | Path, settings: ChatSettings | None = None) -> Chat:
    """The chat of a model's tokenizer; "auto" settings are resolved by probing its template.

    Raises:
        TemplateError: the chat template cannot carry exact tokens.
    """
    settings = settings or ChatSettings()
    tokenizer = load_tokenizer(model)
    if settings.template:
        tokenizer.chat_template = template_text(settings.template)
    tokenizer.name_or_path = tokenizer.name_or_path or str(model)
    return Chat(
        tokenizer,
        settings.parser,
        settings.on_rewrite,
        template_options=settings.template_options,
        tool_role=settings.tool_role,
    )


def open_engine(
    model: PreTrainedModel,
    chat: Chat,
    *,
    synchronous: bool = False,
    settings: EngineSettings | None = None,
    log: Path | None = None,
) -> Engine:
    """The engine that samples turns of a chat with a loaded model.

    vLLM, and any engine in a separate process, uses only the model's folder and precision; vLLM's
    own weights are random until the first `load`.

    Args:
        log: file for the output of an engine's process; None keeps it only for errors.

    Raises:
        EngineAway: the engine's process ended while it started.
    """
    settings = settings or EngineSettings()
    if settings.name == "transformers" and not settings.has_process:
        _refuse_vocabulary(chat, int(model.config.get_text_config().vocab_size))
        history_mb, routing = settings.history_mb, settings.routing != "off"
        return transformers_engine(
            model, chat, synchronous=synchronous, history_mb=history_mb, routing=routing
        )
    return _opened(engine_opener(model, chat, settings, synchronous=synchronous), settings, log)


def engine_opener(
    model: PreTrainedModel, chat: Chat, settings: EngineSettings, *, synchronous: bool = False
) -> Callable[[], Engine]:
    """A function that opens the engine of a loaded model in any process; it can be pickled.

    It uses only the model's folder and precision, and vLLM's weights are random until the first
    `load`.
    """
    _refuse_vocabulary(chat, int(model.config.get_text_config().vocab_size))
    base: Any = getattr(model, "get_base_model", lambda: model)()
    dtype = getattr(model, "computes_in", None) or next(model.parameters()).dtype
    folder = Path(base.name_or_path)
    if settings.name == "vllm":
        return _vllm_opener(folder, chat, settings, dtype, synchronous, empty=True)
    return partial(
        loaded_engine,
        folder,
        chat.stop_ids,
        device=str(model.device),
        dtype=dtype,
        pad_id=chat.tokenizer.pad_token_id or 0,
        synchronous=synchronous,
        history_mb=settings.history_mb,
    )


def open_vllm(
    model: str | Path, chat: Chat, settings: EngineSettings, log: Path | None = None
) -> Engine:
    """The vLLM engine of a model's folder, with the folder's weights; `log` as above."""
    folder = find_model(model)
    _refuse_vocabulary(chat, int(load_config(folder).get_text_config().vocab_size))
    opener = _vllm_opener(folder, chat, settings, own_dtype(folder), False, empty=False)
    return _opened(opener, settings, log)


def _opened(opener: Callable[[], Engine], settings: EngineSettings, log: Path | None) -> Engine:
    """The engine, in this process or in a separate one."""
    if not settings.has_process:
        return opener()
    from agentrl.engines.own_process.process import ProcessEngine

    refuse_missing(settings)
    return ProcessEngine(opener, label=settings.name, log=log)


def _vllm_opener(
    folder: Path, chat: Chat, settings: EngineSettings, dtype: Any, synchronous: bool, empty: bool
) -> Callable[[], Engine]:
    from agentrl.engines.vllm import VllmEngine

    chosen = str(dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
    return partial(
        VllmEngine,
        folder,
        chat.stop_ids,
        settings,
        dtype=chosen,
        synchronous=synchronous,
        empty=empty,
    )


def _refuse_vocabulary(chat: Chat, size: int) -> None:
    """Refuse a tokenizer with tokens that the model does not have."""
    largest = max(chat.tokenizer.get_vocab().values())
    if largest >= size:
        raise ConfigError(
            f"tokenizer {chat.tokenizer.name_or_path!r} has token ids up to {largest}, and the"
            f" model a vocabulary of {size}: give the tokenizer of this model, or resize the"
            " model's embeddings"
        )


def check_model(model: str | Path, settings: ChatSettings | None = None) -> dict[str, Any]:
    """Run the contract of a chat template on a model's own tokenizer.

    Returns:
        model, parser, on_rewrite, tool_role, rewrites_history, shows_tools, round_trip, and
        problems: every broken promise in one sentence. Where the template is refused, that is the
        problem, and what was not found out is None.

    Raises:
        ConfigError: there is no such model or template, or no tokenizer that can be loaded.
    """
    settings = settings or ChatSettings()
    row: dict[str, Any] = {"model": str(model), "parser": None, "on_rewrite": settings.on_rewrite}
    row |= dict.fromkeys(("tool_role", "rewrites_history", "shows_tools", "round_trip"))
    try:
        chat = open_chat(model, settings)
    except TemplateError as error:
        return row | {"round_trip": False, "problems": [str(error)]}
    problems = check_chat(chat)
    if not chat.round_trip:
        problems.insert(
            0,
            f"parser {chat.parser} does not read back the calls that the template writes; set"
            " chat.parser to 'auto'",
        )
    return row | {
        "parser": chat.parser,
        "tool_role": chat.template.tool_role,
        "rewrites_history": chat.rewrites_history,
        "shows_tools": chat.shows_tools,
        "round_trip": chat.round_trip,
        "problems": problems,
    }
