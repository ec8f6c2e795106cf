import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    """What a test sets (a server takes all cores) is not left to the tests after it: some compare bits."""
    yield
    torch.set_num_threads(1)
