"""Peers of sessions, placed in every way; nodes find each other through a store of this process."""

from __future__ import annotations

import pytest
from support.collective_cases import PLACES, Peers, listen_or_connect


@pytest.fixture(params=PLACES)
def peers(request: pytest.FixtureRequest) -> Peers:
    return Peers(*PLACES[request.param])


@pytest.fixture(autouse=True)
def stores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedreduce.collective.node_registration.listen_or_connect", listen_or_connect)
