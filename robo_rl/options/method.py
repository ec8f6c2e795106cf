"""What all online methods have in common."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of an online RL method."""
