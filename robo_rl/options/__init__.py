"""Every option of a policy or a method, as frozen dataclasses that import nothing heavy (so `--help` is instant).

Values are checked where they are made: a bad one raises UserError with the allowed range.
"""

from robo_rl.options.method import MethodOptions, RolloutOptions
from robo_rl.options.offpolicy import (
    AloeOptions,
    CalQlOptions,
    ExpoOptions,
    HilSerlOptions,
    IqlOptions,
    OffPolicyOptions,
    PaRlOptions,
    RlpdOptions,
    WsrlOptions,
)
from robo_rl.options.onpolicy import (
    CORRECTIONS,
    PROXIMALS,
    DppoOptions,
    NftOptions,
    OnPolicyOptions,
    PiRlOptions,
    PpoOptions,
    ReinFlowOptions,
)
from robo_rl.options.person import Person
from robo_rl.options.policy import BcOptions, PolicyOptions

__all__ = [
    "AloeOptions", "BcOptions", "CORRECTIONS", "CalQlOptions", "DppoOptions", "ExpoOptions",
    "HilSerlOptions", "IqlOptions", "MethodOptions", "NftOptions", "OffPolicyOptions", "OnPolicyOptions",
    "PROXIMALS", "PaRlOptions", "Person", "PiRlOptions", "PolicyOptions", "PpoOptions",
    "ReinFlowOptions", "RlpdOptions", "RolloutOptions", "WsrlOptions",
]
