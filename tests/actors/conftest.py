import pytest

from tests.actors.tiny_llama import make_folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A random Llama with a head of its own."""
    return make_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def tied_llama_folder(tmp_path_factory):
    """A random Llama whose head is its embedding."""
    return make_folder(tmp_path_factory.mktemp("tied") / "model", tied=True)
