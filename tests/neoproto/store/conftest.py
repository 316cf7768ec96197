from __future__ import annotations

import pytest

from tests.neoproto.store.shm_host import Host


@pytest.fixture
def host():
    host = Host()
    yield host
    host.owner.release()
