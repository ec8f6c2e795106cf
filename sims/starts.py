"""`robo_rl.starts` under the name the simulators use."""

from robo_rl.starts import StartStream, hashed, uniforms

__all__ = ["StartStream", "hashed", "uniforms"]
