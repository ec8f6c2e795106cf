"""Every option of a policy or a method, as frozen dataclasses that import nothing heavy (so `--help` is
instant).

Values are checked where they are made: a bad one raises UserError with the allowed range.
"""

from robo_rl.options.data import DataOptions
from robo_rl.options.lora import LoraOptions
from robo_rl.options.method import MethodOptions, RolloutOptions
from robo_rl.options.offpolicy import (
    AloeOptions,
    CalQlOptions,
    DemoFlowOptions,
    DemoSacOptions,
    DsrlOptions,
    ExpoOptions,
    HilSerlOptions,
    IqlOptions,
    OffPolicyOptions,
    PaRlOptions,
    RlpdOptions,
    SacOptions,
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
from robo_rl.options.policy import AROUND_FLOWS, FLOWS, FROM_REPLAY, TOKENS, VLAS, BcOptions, PolicyOptions
from robo_rl.options.recap import RecapOptions
from robo_rl.options.scripted_operator import ScriptedOperatorOptions

OFF_POLICY = {
    "rlpd": RlpdOptions,
    "demo_sac": DemoSacOptions,
    "hil_serl": HilSerlOptions,
    "expo": ExpoOptions,
    "pa_rl": PaRlOptions,
    "dsrl": DsrlOptions,
    "demo_flow": DemoFlowOptions,
    "iql": IqlOptions,
    "calql": CalQlOptions,
    "wsrl": WsrlOptions,
    "aloe": AloeOptions,
}  # these learn from replay (experiment/replay.py)
OFFLINE = {"recap": RecapOptions}  # these learn from data sets of whole episodes (experiment/recap.py)
RL_OPTIONS = {
    "pi_rl": PiRlOptions,
    "ppo": PpoOptions,
    "dppo": DppoOptions,
    "reinflow": ReinFlowOptions,
    "nft": NftOptions,
    **OFF_POLICY,
    **OFFLINE,
}
ALGOS = (*RL_OPTIONS, "bc")

__all__ = [
    "ALGOS",
    "AROUND_FLOWS",
    "AloeOptions",
    "BcOptions",
    "CORRECTIONS",
    "CalQlOptions",
    "DataOptions",
    "DemoSacOptions",
    "DppoOptions",
    "DemoFlowOptions",
    "DsrlOptions",
    "ExpoOptions",
    "FLOWS",
    "FROM_REPLAY",
    "HilSerlOptions",
    "IqlOptions",
    "LoraOptions",
    "MethodOptions",
    "NftOptions",
    "OFFLINE",
    "OFF_POLICY",
    "OffPolicyOptions",
    "OnPolicyOptions",
    "PROXIMALS",
    "PaRlOptions",
    "PiRlOptions",
    "PolicyOptions",
    "PpoOptions",
    "RL_OPTIONS",
    "RecapOptions",
    "ReinFlowOptions",
    "RlpdOptions",
    "RolloutOptions",
    "SacOptions",
    "ScriptedOperatorOptions",
    "TOKENS",
    "VLAS",
    "WsrlOptions",
]
