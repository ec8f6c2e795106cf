"""Stubs of the parts of Isaac Lab 2.3 that the adapter and tasks use; launch `isaaclab.app` before importing more."""  # noqa: E501
