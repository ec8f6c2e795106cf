"""LeRobot's side of `robo_rl eval --policy lerobot:FOLDER`: a policy of LeRobot's in a process and an
environment of its own.

    PYTHON -m robo_rl.experiment.lerobot_worker FOLDER FD [DEVICE]      FD: of a connected socket

Messages are those of `controllers.remote`, JSON and raw arrays, no pickle. First the worker says what its
policy takes ({"type", "state", "action", "views", "horizon", "history"}, or {"error"}). Then each question,
"state" [N,S], "image/<view>" [N,h,w,3], "tasks" (N instructions as places in a list), "seed" and perhaps
"noise" [N,H,W], has an answer: "actions" [N,H,A], or {"error"}. {"reset"} begins episodes. The environment
needs LeRobot with what it needs, and Python 3.11 or newer; of robo_rl only files without dependencies are
read.
"""

import inspect
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from controllers.remote import PIECE, MessageParser, pack

LIMIT = 1 << 30  # bytes of the arrays of a message
IMAGES, STATE = "observation.images.", "observation.state"


class FrameSocket:
    """Whole messages over a socket."""

    def __init__(self, wire: socket.socket):
        self.wire, self.parser = wire, MessageParser(LIMIT)

    def send(self, arrays: Mapping[str, np.ndarray], **fields: object) -> None:
        """Send one message."""
        self.wire.sendall(pack(dict(arrays), **fields))

    def receive(self) -> tuple[dict, dict[str, np.ndarray]] | None:
        """(fields, arrays) of the next message; None: the other side has gone. TimeoutError as the socket has
        it."""
        while not self.parser.whole():
            piece = self.wire.recv(PIECE)
            if not piece:
                return None
            self.parser.feed(piece)
        return self.parser.take()


class LeRobotModel:
    """A policy that LeRobot saved in a folder, with its processors, on a device."""

    def __init__(self, folder: str, device: str = "cpu"):
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # pyright: ignore[reportMissingImports]  # isort: skip
        from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]

        config = PreTrainedConfig.from_pretrained(folder)
        config.device, config.pretrained_path = device, folder
        self.policy = get_policy_class(config.type).from_pretrained(folder, config=config).to(device).eval()
        self.before, self.after = make_pre_post_processors(
            config, pretrained_path=folder, preprocessor_overrides={"device_processor": {"device": device}}
        )
        views = [
            k.removeprefix(IMAGES)
            for k in config.input_features
            if k.startswith(IMAGES) and ".empty_camera_" not in k
        ]
        state = config.input_features.get(STATE)
        self.history = config.n_obs_steps > 1  # it looks back: one action at a time
        self.about = {
            "type": config.type,
            "state": state.shape[0] if state else 0,
            "action": config.output_features["action"].shape[0],
            "views": views,
            "horizon": 1 if self.history else int(getattr(config, "chunk_size", 0) or config.n_action_steps),
            "history": self.history,
        }
        self.takes_noise = "noise" in inspect.signature(self.policy.predict_action_chunk).parameters

    def reset(self) -> None:
        """Episodes begin."""
        self.policy.reset()

    def act(self, arrays: Mapping[str, np.ndarray], tasks: list[str], seed: int) -> np.ndarray:
        """Actions float32 [N,H,A] in the units of the policy's data."""
        import torch

        batch: dict[str, Any] = {STATE: torch.from_numpy(arrays["state"].copy()), "task": tasks}
        for name, x in arrays.items():
            if name.startswith("image/"):
                batch[IMAGES + name[6:]] = torch.from_numpy(x.copy()).permute(0, 3, 1, 2).float() / 255
        batch = self.before(batch)
        torch.manual_seed(seed)
        with torch.inference_mode():
            if self.history:
                return self.after(self.policy.select_action(batch))[:, None].float().cpu().numpy()
            given = (
                {"noise": torch.from_numpy(arrays["noise"].copy())}
                if "noise" in arrays and self.takes_noise
                else {}
            )
            chunk = self.policy.predict_action_chunk(batch, **given)
            return (
                torch.stack([self.after(chunk[:, i]) for i in range(chunk.shape[1])], 1).float().cpu().numpy()
            )


def answer_questions(wire: FrameSocket, model) -> None:
    """Say what the model takes, then answer questions until the other side goes; what fails is said and costs
    that question alone."""
    wire.send({}, **model.about)
    while (message := wire.receive()) is not None:
        fields, arrays = message
        try:
            if fields.get("reset"):
                model.reset()
                continue
            texts = fields["texts"]
            actions = model.act(arrays, [str(texts[i]) for i in fields["tasks"]], int(fields["seed"]))
        except Exception as e:  # noqa: BLE001 (whatever LeRobot raises is told to who asked)
            wire.send({}, error=f"{type(e).__name__}: {e}"[:2000])
            continue
        wire.send({"actions": np.ascontiguousarray(actions, np.float32)})


def main(argv: list[str]) -> int:
    """Load and serve; what LeRobot prints goes to stderr."""
    wire = FrameSocket(socket.socket(fileno=int(argv[1])))
    os.dup2(2, 1)
    try:
        model = LeRobotModel(argv[0], *argv[2:3])
    except Exception as e:  # noqa: BLE001 (the process ends; its last words go to who started it)
        traceback.print_exc()
        wire.send({}, error=f"{type(e).__name__}: {e}"[:2000])
        return 1
    answer_questions(wire, model)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
