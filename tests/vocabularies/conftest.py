from __future__ import annotations

import pytest
from tests.vocabularies.real import NAMES, load


# For the session, so that pytest runs all tests of one tokenizer before it loads the next.
@pytest.fixture(scope="session", params=NAMES)
def subject(request):
    return load(request.param)
