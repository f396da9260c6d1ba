"""A tiny model, its chat, the transformers engine on both, and an engine in its own process."""

import asyncio
from functools import partial

import pytest
from carried import Carried
from helpers import tiny_model_folder

from agentrl.chat.tokens import Chat
from agentrl.engines.loading import load_model, load_tokenizer, transformers_engine
from agentrl.engines.own_process.process import ProcessEngine


@pytest.fixture(scope="module")
def model():
    return load_model(tiny_model_folder())


@pytest.fixture(scope="module")
def chat():
    return Chat(load_tokenizer(tiny_model_folder()))


@pytest.fixture
def engine(model, chat):
    made = transformers_engine(model, chat)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def opened(nothing_is_left, tmp_path):
    made = []

    def open_(**options):
        log = tmp_path / "run" / "engine.log"
        made.append(ProcessEngine(partial(Carried, **options), label="carried", log=log))
        return made[-1]

    yield open_
    for engine in made:
        asyncio.run(engine.close())
        asyncio.run(engine.close())
