"""openpi's websocket wire: a run's policy served on it, and a foreign server on it as a policy
(`controllers.openpi` has the messages).

Names of an observation: "state" or "observation/state"; "image/<view>", "observation/<view>" or
"observation/image/<view>", the first view also "observation/image" and the second "observation/wrist_image";
"prompt". What a server of ours expects is in its first message.
"""

import contextlib
import errno
import hmac
import http
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from controllers.openpi import packb, unpackb
from controllers.remote import plain_text
from controllers.serving import LARGE, PICTURE, RECORDS_NOTHING, SparseLog, tells_outcome
from robo_rl.errors import MissingDependency, UserError, plural
from robo_rl.experiment.batching import Batcher, by_size
from robo_rl.experiment.model_units import units_of_run
from robo_rl.human.console.access import BoundedListener
from robo_rl.options.foreign import ActOptions

if TYPE_CHECKING:
    from robo_rl.experiment.policy_server import ServedPolicy, ServeOptions

CONNECTIONS = 8  # that an evaluation asks over at once
DEADLINE = 10.0  # s for an answer to an arm, or to robots that people watch
WARM_UP = 300.0  # s for the first answer
FIRST_VIEWS = ("observation/image", "observation/wrist_image")  # as openpi's environments name two cameras


def names_of(spec) -> dict[str, tuple[str, ...]]:
    """{our name: names that it may have on the wire}."""
    out: dict[str, tuple[str, ...]] = {"state": ("state", "observation/state", "observation.state")}
    for i, v in enumerate(spec.views):
        out[f"image/{v}"] = (
            f"image/{v}",
            f"observation/image/{v}",
            f"observation/{v}",
            f"observation.images.{v}",
            *FIRST_VIEWS[i : i + 1],
        )
    return out


def read_observation(message: Any, spec, instruction: str) -> dict[str, Any]:
    """What a policy takes, of a message. UserError: what is missing, of another size or not finite.

    A model that makes recorded pictures square by itself gets them as they are."""
    if not isinstance(message, dict):
        raise UserError("an observation is a map of names")
    if isinstance(pictures := message.get("images"), dict):  # as openpi's client of an ALOHA sends them
        message = {f"image/{view}": upright(x) for view, x in pictures.items()} | message
    out: dict[str, Any] = {}
    size = 0 if spec.raw_pictures else spec.image_size
    for name, others in names_of(spec).items():
        x = next((message[k] for k in others if k in message), None)
        if x is None:
            raise UserError(f"the observation lacks {name} (or {', '.join(others[1:])})")
        if not isinstance(x, np.ndarray):
            raise UserError(f"{name} is an array (numpy.asarray), got {type(x).__name__}")
        out[name] = read_state(x, spec.state) if name == "state" else read_picture(x, size, name, spec.fit)
    text = message.get("prompt", "")
    if not isinstance(text, str) or len(text) > 4096:
        raise UserError("the prompt is text of at most 4096 letters")
    if spec.language and not (text or instruction):
        raise UserError(
            "the observation lacks prompt: the policy takes an instruction, and the server was given none "
            "(robo_rl serve --instruction)"
        )
    return out | {"task": text or instruction}


def upright(x: Any) -> Any:
    """A picture [3,h,w] as [h,w,3]; all else as it is."""
    first = isinstance(x, np.ndarray) and x.ndim == 3 and x.shape[0] == 3 != x.shape[2]
    return x.transpose(1, 2, 0) if first else x


def read_state(x: np.ndarray, size: int) -> np.ndarray:
    """float32 [S]."""
    if x.shape != (size,):
        raise UserError(f"the run's state has {size} numbers, got shape {x.shape}")
    with np.errstate(over="ignore"):  # what is too large is not finite then
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise UserError("the state is not finite")
    return x


def read_picture(x: np.ndarray, size: int, name: str, how: str = "") -> np.ndarray:
    """uint8 [size,size,3] (size 0: as it is), of a square picture of any size; of one that is not square too
    where the policy learnt `how` it becomes so."""
    if (
        x.dtype != np.uint8
        or x.ndim != 3
        or x.shape[2] != 3
        or (not how and x.shape[0] != x.shape[1])
        or not 0 < min(x.shape[:2]) <= max(x.shape[:2]) <= PICTURE
    ):
        kind = "picture uint8 [h, w, 3]" if how else "square picture uint8 [h, h, 3]"
        raise UserError(f"{name} is a {kind}, got {x.dtype} of shape {x.shape}")
    if not size or x.shape[:2] == (size, size):
        return x
    import torch

    if how:
        from robo_rl.policies.images import fit_bytes

        return fit_bytes(torch.from_numpy(np.ascontiguousarray(x))[None], size, cast(Any, how))[0].numpy()
    pixels = torch.from_numpy(x).permute(2, 0, 1)[None].float()
    small = torch.nn.functional.interpolate(
        pixels, (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return small[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy()


def batch_actor(
    folder: Path, seed: int, device: str = "cpu", most: int = 0
) -> "tuple[Callable[[Sequence[dict]], list[np.ndarray]], Any]":
    """(act: observations -> rows float32[E, A] of each, ObsSpec) of a checkpoint, on `device`, warmed up;
    most: see `policy_server.torch_actor`."""
    from robo_rl import checkpoint

    policy, _ = checkpoint.load_policy(folder, device)
    return policy_actor(policy, seed, most), policy.spec


def policy_actor(policy, seed: int, most: int = 0) -> Callable[[Sequence[dict]], list[np.ndarray]]:
    """Observations -> rows float32[E, A] of each, by one call of the policy; warmed up."""
    import torch

    from robo_rl.experiment.policy_server import quick_chunks
    from robo_rl.policies import blank_obs, obs_tensors
    from robo_rl.rollout import to_policy

    generator = torch.Generator().manual_seed(seed)

    def tensors(batch: Sequence[dict]) -> dict[str, Any]:
        obs = {k: np.stack([o[k] for o in batch]) for k in batch[0] if k != "task"} | {
            "task": np.array([o["task"] for o in batch])
        }
        return to_policy(obs_tensors(obs, policy.spec), policy)

    def act(batch: Sequence[dict]) -> list[np.ndarray]:
        obs = tensors(batch)
        if chunks is None:
            actions = policy.act(obs, generator, explore=False).actions
        else:
            actions = chunks(obs, generator)[:, : policy.options.execute]
        return list(policy.spec.cut(actions).cpu().numpy())

    blank = blank_obs(policy.spec) | {"task": "go"}
    chunks = quick_chunks(policy, tensors([blank]), most)
    act([blank])
    act([blank, blank])
    generator.manual_seed(seed)
    return partial(by_size, act)


def serve_openpi(
    options: "ServeOptions",
    on_ready: "Callable[[ServedPolicy], None]",
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Answer clients of openpi's wire for ever; arguments as
    `robo_rl.experiment.policy_server.serve_policy`."""
    from controllers.remote import read_token
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.folder import pick_checkpoint
    from robo_rl.experiment.policy_server import (
        TOKEN_FILE,
        ServedPolicy,
        default_instruction,
        make_sessions,
        serving_threads,
    )

    where, folder = pick_checkpoint(Path(options.run), options.checkpoint)
    config = load_config(where)
    if options.task:
        raise UserError("--wire openpi takes the state of all of a run's tasks: it goes without --task")
    log(f"loading the policy of {options.run}")
    import torch

    torch.set_num_threads(serving_threads(options.threads))
    sessions = None
    if options.share:
        act, sessions, config, spec = make_sessions(options, log)
    else:
        act, spec = batch_actor(folder, options.seed, options.device, options.batch)
        spec, units = units_of_run(where, config.sim, spec)
        if units is not None:
            act = units.batches(act)
    instruction = options.instruction
    if spec.language and not instruction:
        with contextlib.suppress(UserError):  # the task has none or several: then every question has its own
            instruction = default_instruction(config, where)
    token_file = Path(options.token) if options.token else where / TOKEN_FILE
    token = read_token(token_file, make=True)
    batcher = Batcher(act, options.batch).start()
    name = f"{where.resolve().name}/{folder.name}"
    server = open_server(options, token, batcher, spec, instruction, log, sessions, name)
    host, port = server.socket.getsockname()[:2]
    # in a thread: shutdown() waits for this loop's end, for ever where an interrupt kept it from beginning
    loop = threading.Thread(target=server.serve_forever, name="openpi", daemon=True)
    loop.start()
    try:
        on_ready(ServedPolicy(f"{host}:{port}", host in ("127.0.0.1", "::1"), token_file, config))
        loop.join()
    finally:
        server.shutdown()
        batcher.close()
        if sessions is not None:
            sessions.close()


class PatientListener(BoundedListener):
    """For a server with a thread per connection: strangers who are turned away, or descriptors that run out,
    do not end its loop."""

    def __init__(self, address: tuple[str, int]):
        super().__init__(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.lock = threading.Lock()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(address)
        self.settimeout(0.2)  # so that nobody who came and went holds the lock
        self.listen()

    def accept(self):
        while True:
            try:
                with self.lock:
                    return super().accept()
            except OSError as e:  # too many connections, too many files, or nobody after all
                if not isinstance(e, (ConnectionAbortedError, TimeoutError)) and e.errno not in (
                    errno.EMFILE,
                    errno.ENFILE,
                ):
                    raise
                time.sleep(0.01)

    def vouch(self, descriptor: int) -> None:
        with self.lock:
            super().vouch(descriptor)


def answer(
    message: "bytes | str",
    batcher: Batcher,
    spec,
    instruction: str,
    deadline: float,
    sessions=None,
    who: int = 0,
) -> "bytes | str":
    """What a client gets for what it sent: the bytes of a chunk, or a line that says why not.

    sessions: keeps what client `who` does (`controllers.serving.Sessions`).
    """
    began = time.perf_counter()
    try:
        told = unpackb(message if isinstance(message, bytes) else b"")
        fields = told if isinstance(told, dict) else {}
        if sessions is None and tells_outcome(fields):
            raise UserError(RECORDS_NOTHING)
        known = None if sessions is None else sessions.before(who, fields)
        if isinstance(known, dict):
            return packb(known)
        rows = (
            known if known is not None else batcher.ask(read_observation(told, spec, instruction), deadline)
        )
        if sessions is not None and known is None:
            rows = sessions.given(who, fields, rows)
        return packb({"actions": rows, "server_timing": {"infer_ms": 1e3 * (time.perf_counter() - began)}})
    except UserError as e:
        return plain_text(e)


def open_server(
    options: "ServeOptions",
    token: bytes,
    batcher: Batcher,
    spec,
    instruction: str,
    log: Callable[[str], None],
    sessions=None,
    policy: str = "",
):
    """A websocket server of `policy`; `serve_forever` answers. UserError: the address is taken."""
    try:
        from websockets.exceptions import ConnectionClosed
        from websockets.sync.server import serve
    except ImportError:
        raise MissingDependency("--wire openpi needs websockets: pip install 'robo_rl[console]'") from None
    about = {
        "state": spec.state,
        "views": list(spec.views),
        "image_size": 0 if spec.raw_pictures else spec.image_size,
        "action": spec.action,
        "action_names": list(spec.action_names),
        "prompt": spec.language,
        "instruction": instruction,
        "policy": policy,
    }
    here: set = set()
    numbers, log_refusal = itertools.count(), SparseLog(log)

    def admit(connection, request):
        """None, or the response that refuses."""
        said = request.headers.get("Authorization", "")
        if not hmac.compare_digest(said.encode(errors="replace"), b"Api-Key " + token):
            with contextlib.suppress(OSError):  # it is gone already, and nobody knows who it was
                log_refusal(
                    f"{connection.remote_address[0]}: refused, its API key is not the token of this server"
                )
            return connection.respond(
                http.HTTPStatus.UNAUTHORIZED, "give the server's token as the API key\n"
            )
        if len(here) >= options.clients:
            return connection.respond(
                http.HTTPStatus.SERVICE_UNAVAILABLE, f"all {options.clients} seats are taken\n"
            )
        listener.vouch(connection.socket.fileno())
        return None

    def talk(connection) -> None:
        here.add(connection)
        count, who, name = 0, next(numbers), "a client"
        try:
            name = connection.remote_address[0]  # a closed connection knows it no more
            connection.send(packb(about))
            while True:
                said = answer(
                    connection.recv(timeout=options.idle),
                    batcher,
                    spec,
                    instruction,
                    options.deadline,
                    sessions,
                    who,
                )
                connection.send(said)
                count += isinstance(said, bytes)
        except TimeoutError:
            log(f"{name}: {plural(count, 'chunk')}, it asked nothing for {options.idle:g} s")
        except (ConnectionClosed, OSError):
            log(f"{name}: {plural(count, 'chunk')}")
        finally:
            here.discard(connection)
            if sessions is not None:
                sessions.left(who)

    side = LARGE if spec.raw_pictures else max(spec.image_size, 512)
    need = 4 * spec.state + len(spec.views) * 3 * side**2
    try:
        listener = PatientListener((options.host, options.port))
        return serve(
            talk,
            sock=listener,
            process_request=admit,
            compression=None,
            max_size=max(1 << 20, 2 * need),
            logger=quiet(),
        )
    except OSError as e:
        raise UserError(
            f"cannot listen on {options.host}:{options.port} ({e.strerror}); choose another --host or --port"
        ) from None


def quiet():
    """A logger that writes nothing: whatever strangers send is no reason for a traceback."""
    import logging

    logger = logging.getLogger("robo_rl.openpi")
    logger.propagate, logger.disabled = False, True
    return logger


# ---- a foreign server as a policy --------------------------------------------------------------------------


class OpenpiPolicy:
    """Actions [N, E, A] of a server at `url` for the observations of N envs, asked over several connections
    at once.

    A server of ours says which names it takes; another is asked with openpi's own. `execute`: rows of a chunk
    that are executed.
    """

    def __init__(self, url: str, spec, execute: int, key: str = "", timeout: float = 60.0):
        self.url, self.spec, self.execute, self.key, self.timeout = url, spec, execute, key, timeout
        self.options = ActOptions(execute)
        self.wires: list = []
        wire, self.about = self._connect()
        self.wires.append(wire)
        self.ours = isinstance(self.about, dict) and "views" in self.about
        self.most = CONNECTIONS
        if self.ours and (self.about["state"], self.about["action"]) != (spec.state, spec.action):
            self.close()
            raise UserError(
                f"{url} takes a state of {self.about['state']} numbers and gives {self.about['action']}, the "
                f"env has {spec.state} and {spec.action}"
            )

    def _connect(self) -> tuple[Any, Any]:
        """(a connection, what the server says of itself)."""
        try:
            from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
            from websockets.sync.client import connect
        except ImportError:
            raise MissingDependency(
                "--policy ws://… needs websockets: pip install 'robo_rl[console]'"
            ) from None
        headers = {"Authorization": f"Api-Key {self.key}"} if self.key else None
        try:
            wire = connect(
                self.url,
                compression=None,
                max_size=1 << 26,
                additional_headers=headers,
                open_timeout=10,
                ping_interval=None,  # a server that decides in its only thread answers no pings
                close_timeout=1,
                logger=quiet(),
            )
            said = wire.recv(timeout=self.timeout)
            about = unpackb(said if isinstance(said, bytes) else b"")
        except InvalidStatus as e:
            said = plain_text((e.response.body or b"").decode(errors="replace").strip(), 80)
            raise UserError(
                f"{self.url} refuses ({e.response.status_code}{said and ': '}{said}); "
                "ROBO_RL_TOKEN has a server's token, that of robo_rl serve is in RUN/serve.token"
            ) from None
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as e:
            raise UserError(
                f"no policy answers at {self.url} ({e}); start its server, and give its token as "
                "ROBO_RL_TOKEN"
            ) from None
        return wire, about

    def _reconnect(self) -> Any:
        """One more connection. UserError: another policy of ours is served there by now."""
        wire, about = self._connect()
        if self.ours and about != self.about:
            wire.close()
            raise UserError(f"{self.url} serves another policy by now: {plain_text(about)}")
        return wire

    def message(self, obs: dict, i: int) -> bytes:
        """What env i is asked with."""
        spec = self.spec
        views = [f"image/{v}" for v in spec.views]
        names = dict(
            zip(
                views,
                views if self.ours else [*FIRST_VIEWS, *(f"observation/{v}" for v in spec.views[2:])],
                strict=False,
            )
        )
        out = {
            "state" if self.ours else "observation/state": np.asarray(obs["state"][i], np.float32),
            "prompt": str(obs["task"][i]),
        }
        return packb(out | {names[v]: np.asarray(obs[v][i]) for v in views})

    def __call__(self, obs: dict) -> np.ndarray:
        n = len(obs["state"])
        while len(self.wires) < min(n, self.most):
            try:
                self.wires.append(self._reconnect())
            except UserError:  # it has no more seats: those that are had serve all
                self.most = len(self.wires)
        with ThreadPoolExecutor(len(self.wires)) as pool:
            parts = pool.map(
                lambda k: [(i, self._ask(k, obs, i)) for i in range(k, n, len(self.wires))],
                range(len(self.wires)),
            )
            rows = dict(pair for part in parts for pair in part)
        return np.stack([rows[i] for i in range(n)])

    def _ask(self, k: int, obs: dict, i: int) -> np.ndarray:
        """The rows of env i, over connection k; where the server has closed that, as it does after a while
        without a question, over a new one."""
        from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

        message = self.message(obs, i)
        try:
            try:
                said = self._exchange(k, message)
            except ConnectionClosedOK:
                self.wires[k] = self._reconnect()
                said = self._exchange(k, message)
        except (ConnectionClosed, TimeoutError, OSError) as e:
            raise UserError(
                f"the policy at {self.url} is lost ({e or type(e).__name__}); look at what its server says"
            ) from None
        if isinstance(said, str):
            raise UserError(f"the policy at {self.url} refuses: {said[-300:]}")
        try:
            answer = unpackb(said)
        except UserError as e:
            raise UserError(f"the policy at {self.url}: {e}") from None
        actions = answer.get("actions") if isinstance(answer, dict) else None
        if not isinstance(actions, np.ndarray) or actions.ndim != 2 or not len(actions):
            raise UserError(f"the policy at {self.url} gives no actions [H, {self.spec.action}]")
        if actions.shape[1] != self.spec.action:
            raise UserError(
                f"the policy at {self.url} gives actions of {actions.shape[1]} numbers, the run's have "
                f"{self.spec.action}: it is of another robot; serve a policy of this one"
            )
        with np.errstate(over="ignore"):  # what is too large is not finite then
            rows = actions[: self.execute].astype(np.float32)
        if len(rows) < self.execute:
            raise UserError(
                f"the policy at {self.url} gives chunks of {len(rows)} steps, the run executes "
                f"{self.execute}: --execute {len(rows)}"
            )
        if not np.isfinite(rows).all():
            raise UserError(f"the policy at {self.url} gives actions that are not finite")
        return rows

    def _exchange(self, k: int, message: bytes) -> "bytes | str":
        """What the server answers to a message over connection k."""
        self.wires[k].send(message)
        return self.wires[k].recv(timeout=self.timeout)

    def warm_up(self, instruction: str) -> None:
        """Let it act once, on nothing, as long as that takes: a server compiles at the first question."""
        from robo_rl.policies import blank_obs

        usual, self.timeout = self.timeout, WARM_UP
        self(blank_obs(self.spec, 1) | {"task": [instruction]})
        self.timeout = usual

    def close(self) -> None:
        """Hang up."""
        for wire in self.wires:
            with contextlib.suppress(OSError):
                wire.close()


class OpenpiClient:
    """A `PolicyClient` of a server on openpi's wire, which it owns, asked from a thread: ask() waits up to
    `patience` [s] for an answer that comes at once. It is lost when an answer takes more than `deadline` [s].
    blocks: the arm stands still meanwhile, and `patience` is above `deadline`."""

    def __init__(
        self,
        policy: OpenpiPolicy,
        instruction: str,
        patience: float,
        deadline: float = DEADLINE,
        blocks: bool = False,
    ):
        self.policy, self.instruction, self.patience, self.blocks = policy, instruction, patience, blocks
        self.pool = ThreadPoolExecutor(1, "openpi")
        self.asked: tuple[Future[np.ndarray], float] | None = None  # the answer to come, t0 of its question
        self.since = 0.0
        try:
            policy.warm_up(instruction)
        except BaseException:
            self.close()
            raise
        policy.timeout = self.deadline = deadline

    def ask(self, obs: Mapping[str, np.ndarray], t0: float, prefix=None) -> None:
        if prefix is not None:
            raise UserError(f"{self.policy.url} takes no rows to agree with: use --chunking blend or naive")
        question = {k: np.array(v)[None] for k, v in obs.items()} | {"task": [self.instruction]}
        self.asked, self.since = (self.pool.submit(self.policy, question), t0), time.monotonic()
        wait([self.asked[0]], self.patience)

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        if self.asked is None:
            return None
        if not self.asked[0].done():
            if time.monotonic() - self.since > self.deadline + 1:  # it does not even take the question
                raise UserError(f"the policy at {self.policy.url} is lost (it takes nothing any more)")
            return None
        (answer, t0), self.asked = self.asked, None
        return answer.result()[0], t0

    def close(self) -> None:
        """Hang up, which ends the thread's wait."""
        self.policy.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
