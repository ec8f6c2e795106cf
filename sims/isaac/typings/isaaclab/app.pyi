"""`isaaclab.app`: starts the simulator; must run before any other import of isaaclab."""

from typing import Any

class AppLauncher:
    app: Any
    def __init__(self, launcher_args: Any = None, **kwargs: Any) -> None: ...
