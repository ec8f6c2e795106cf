"""`python -m robo_rl` is the `robo_rl` command."""

from robo_rl.cli import main

main()
