"""A tokenizer of single bytes, and a server over the fake engine that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from model.checkpoint.resolve import open_model
from model.tokenizer import Tokenizer
from tests.scripts.tiny import write_tiny
from tests.serve.fake_engine import FakeEngine
from tests.serve.live import PATIENCE_S, Live, live_server


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_model(str(write_tiny(tmp_path_factory.mktemp("tiny") / "model"))).load_tokenizer()


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    engine = FakeEngine()
    with live_server(engine, tokenizer) as server:
        yield server
    engine.close()


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as found:
        yield found
