"""`--device` of the commands that a trained policy acts in."""


def check_policy_device(name: str) -> None:
    """UserError: torch cannot use the device of that name here. For the CPU torch is not loaded, as NumPy may
    act in its place."""
    if name != "cpu":
        from robo_rl.devices import check_device

        check_device(name)
