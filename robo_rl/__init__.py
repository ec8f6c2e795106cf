"""robo_rl: flow and diffusion robot policies, taught by a few demonstrations and improved by online RL.

Importing this package is light: torch, MuJoCo and the simulators load where they are used.
"""

__version__ = "0.1.0"
