"""The folder of a tiny policy of random weights."""

import pytest
from trainer_cases import tiny_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The folder of a policy."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(folder)
    return folder
