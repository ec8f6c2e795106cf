"""Stubs of the parts of Isaac Gym (Preview 4) that tasks of IsaacGymEnvs use; import it before torch."""

from . import gymapi as gymapi
from . import gymtorch as gymtorch
from . import torch_utils as torch_utils
