import sys
import urllib.request
from urllib.error import URLError

import pytest


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def no_torchtext(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtext", None)
