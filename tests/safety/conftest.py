"""What each test of a policy starts from."""

import pytest
from policy_cases import Till


@pytest.fixture(autouse=True)
def nothing_is_paid():
    Till.paid = 0
