import pytest

from robo_rl.child import set_openmp

set_openmp()  # before torch: two threads of a test do not spin for a core that the other worker has
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)
# no test judges how long anything takes
settings.register_profile("robo_rl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("robo_rl")


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    """What a test sets (a server takes all cores) is not left to the tests after it: some compare bits."""
    yield
    torch.set_num_threads(1)
