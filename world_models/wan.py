"""Camera frames in the latents of a video autoencoder, by a video transformer: `AutoencoderKLWan` and
`WanTransformer3DModel` of diffusers, with fresh weights or those of a local folder (`vae/` and
`transformer/`, as Wan 2.1's text-to-video models have them).

A clip is [the episode's first frame | the last 1 + 4 (H-1) frames | the next C], all cameras side by side.
The autoencoder is causal, so its latents (one of the first frame, H of the history, C/4 of what comes) do not
look ahead. Of these z, with actions a and states s:

    (1)  x_t = (1-t) z + t eps on the latents to come,   v^ = trunk(x, t per token; tokens of s, a, words)
         loss = |v^ - (eps - z)|^2
    (2)  x <- a_k x + b_k v^ + s_k noise,   t = 1 .. 0 in K steps: the tables of `robo_rl.sampling`

Latents of the history are at a time of their own: 0 in use; in learning some carry noise and are at its time
(diffusion forcing, Chen et al. 2024, arXiv 2407.01392), and a share of them come of the model's own frames
(`wan_fit`). The arm's state is rolled out by a small ensemble (`world_models.latent`), heads look at decoded
frames (`world_models.video_heads`), as those of a `video` model.

With a folder the autoencoder stays as it is, and the transformer learns in adapters (`net.lora.rank`) or in
full. A model's own folder then holds what was learnt, and reads the rest where it was.

Departures: actions and words take the place of the text encoder's tokens; the pipelines of diffusers are not
used, so there is no guidance and no scheduler of theirs; a flow with uniform times, not shifted ones.

Axes: `B` batch, `C` frames of a chunk, `H` history, `L` latent frames, `Z` channels of a latent, `V` views,
`S` state, `A` action.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.errors import MissingDependency, UserError
from robo_rl.files import read_json
from robo_rl.lora import attach, frozen_names
from robo_rl.options.lora import LoraOptions
from robo_rl.sampling import flow_table
from world_models.latent import Latent, latent_options
from world_models.model import Carry, Frames, Prediction, WorldSpec, at_home, pictures_of, products
from world_models.video import (
    PATCH,
    Heads,
    in_chunks,
    lane_noise,
    outcomes,
    padded,
    patches_of,
    standard,
    to_frames,
)
from world_models.wan_options import DiffusersOptions

TIME = 1000.0  # what the transformer calls t = 1
FACTOR = 4  # frames of a latent one
PARTS = {"vae": "AutoencoderKLWan", "transformer": "WanTransformer3DModel"}  # folder: class


# ---- what diffusers has ------------------------------------------------------------------------------------


def library():
    """The module `diffusers`, imported by need."""
    try:
        import diffusers
    except ImportError as e:
        raise MissingDependency(
            f"--kind diffusers needs diffusers ({e}): pip install -c constraints.txt '.[diffusers]'"
        ) from None
    return diffusers


def check_folder(folder: str) -> dict[str, dict]:
    """The configs of a folder's parts; UserError in one line where it is not of this architecture."""
    found = {}
    for part, name in PARTS.items():
        at = Path(folder) / part / "config.json"
        try:
            found[part] = read_json(at)
            kind = str(found[part]["_class_name"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            why = "has no" if not at.is_file() else f"has a damaged ({type(e).__name__})"
            raise UserError(
                f"net.folder {folder} {why} {part}/config.json; give a folder with vae/ and transformer/, as "
                "diffusers saves Wan 2.1"
            ) from None
        if kind != name:
            raise UserError(
                f"net.folder {folder} holds {kind} as {part}; this kind is of {PARTS['vae']} and "
                f"{PARTS['transformer']}: give the folder of a Wan 2.1, or leave it out for fresh weights"
            )
    z, takes = found["vae"].get("z_dim", 16), found["transformer"].get("in_channels", 16)
    gives = found["transformer"].get("out_channels") or takes
    if (takes, gives) != (z, z):
        raise UserError(
            f"net.folder {folder}: the transformer maps {takes} channels to {gives}, the autoencoder has "
            f"{z}; give a text-to-video model, whose three agree"
        )
    times = 2 ** sum(bool(x) for x in found["vae"].get("temperal_downsample", (False, True, True)))
    if times != FACTOR or found["vae"].get("patch_size"):
        raise UserError(
            f"net.folder {folder}: an autoencoder that makes {FACTOR} frames one and has no patches of its "
            "own is needed (Wan 2.1)"
        )
    return found


def fingerprint(folder: str) -> int:
    """CRC-32 of the beginnings and sizes of a folder's weights: whether they are those that a model was
    learnt on."""
    crc = 0
    for part in PARTS:
        at = Path(folder) / part
        for path in sorted([*at.glob("*.safetensors"), *at.glob("*.bin")]):
            with path.open("rb") as f:
                crc = zlib.crc32(f.read(1 << 20) + str(path.stat().st_size).encode(), crc)
    return crc


def saved_part(cls, folder: str, part: str):
    """The module of diffusers in a folder's `part`; UserError for weights that are damaged, or are not those
    that its config.json tells of: they would be drawn anew, or left out."""
    where = {"local_files_only": True, "torch_dtype": torch.float32, "output_loading_info": True}
    said = library().utils.logging
    level = said.get_verbosity()
    said.set_verbosity_error()  # what it warns of is told below
    try:
        made, told = cls.from_pretrained(str(Path(folder) / part), **where)
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as e:
        raise UserError(f"net.folder {folder}: {part} cannot be read: {str(e).splitlines()[0]}") from None
    finally:
        said.set_verbosity(level)
    for words, names in (("lack", told["missing_keys"]), ("also hold", told["unexpected_keys"])):
        if names:
            raise UserError(
                f"net.folder {folder}: the weights of {part} {words} {sorted(names)[0]} ({len(names)} such) "
                "beside what its config.json tells of: take both from one download"
            )
    return made


def parts_of(options: DiffusersOptions) -> tuple[Any, Any]:
    """(autoencoder, transformer): those of the folder, or of the options' sizes with fresh weights."""
    d, o = library(), options
    if o.folder:
        check_folder(o.folder)
        vae, trunk = (saved_part(getattr(d, name), o.folder, part) for part, name in PARTS.items())
        return vae, trunk
    vae = d.AutoencoderKLWan(
        base_dim=o.vae_width,
        z_dim=o.latent,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * o.latent,
        latents_std=[1.0] * o.latent,
        scale_factor_spatial=4,
    )
    trunk = d.WanTransformer3DModel(
        num_attention_heads=o.heads,
        attention_head_dim=o.width // o.heads,
        in_channels=o.latent,
        out_channels=o.latent,
        text_dim=o.width,
        freq_dim=64,
        ffn_dim=4 * o.width,
        num_layers=o.depth,
    )
    return vae, trunk


class ActionTokens(nn.Module):
    """State before a chunk [B,S], its change to each step [B,C,S] and what is told of the actions [B,C,A] ->
    tokens [B,C,D]."""

    def __init__(self, inputs: int, chunk: int, width: int):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(inputs, 256), nn.SiLU(), nn.Linear(256, width))
        self.place = nn.Parameter(0.02 * torch.randn(chunk, width))

    def forward(self, state: Tensor, motion: Tensor, actions: Tensor) -> Tensor:
        return (
            self.enter(torch.cat([state[:, None].expand(-1, motion.shape[1], -1), motion, actions], 2))
            + self.place
        )


# ---- the model ---------------------------------------------------------------------------------------------


class WanVideo(nn.Module):
    """The model; see the module."""

    frames: Frames
    shift: Tensor
    pixel: Tensor
    mean: Tensor  # of latents, by channel
    std: Tensor
    base: Tensor
    vae: Any  # of diffusers
    trunk: Any
    patch: tuple[int, int, int]

    def __init__(self, spec: WorldSpec, options: DiffusersOptions, seed: int = 0):
        super().__init__()
        self.spec, self.options = spec, options
        views, size, s, a = len(spec.control.views), spec.image_size, spec.state, spec.action
        self.proprio = Latent(spec, options.proprio, seed)
        words = self.proprio.words.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.vae, self.trunk = parts_of(options)
            shrink, self.patch = self.vae.config.scale_factor_spatial or 8, self.trunk.config.patch_size
            if not views or self.patch[0] != 1 or size % (shrink * self.patch[1]) or size % (2 * PATCH):
                raise UserError(
                    f"this model needs cameras of a multiple of {shrink * self.patch[1]} pixels, the data "
                    f"has {', '.join(spec.control.views) or 'none'} of {size}; record with robo_rl collect "
                    "--obs rgb --image-size N"
                )
            self.tokens = ActionTokens(2 * s + a + words, options.chunk, self.trunk.config.text_dim)
            self.heads = Heads(views, size // PATCH, s, a + words, options.head_width)
            self.doubt = Heads(views, size // PATCH, s, a + words + 2, 16, 1)
        z = self.vae.config.z_dim
        self.register_buffer("shift", torch.zeros(2))  # logits of success and end that mean 1/2
        self.register_buffer("pixel", torch.ones(views))  # std of a pixel over the data
        self.register_buffer(
            "mean", torch.tensor(self.vae.config.latents_mean, dtype=torch.float32).view(z, 1, 1, 1)
        )
        self.register_buffer(
            "std", torch.tensor(self.vae.config.latents_std, dtype=torch.float32).view(z, 1, 1, 1)
        )
        self.register_buffer("base", torch.tensor(fingerprint(options.folder) if options.folder else 0))
        self.elsewhere: set[str] = set()  # names of weights that are in the folder, not in this model's own
        if options.folder:
            self.vae.requires_grad_(False)
            self.elsewhere = {f"vae.{k}" for k in self.vae.state_dict()}
        if options.lora.rank:
            attach(self, options.lora, seed)
            self.elsewhere |= (
                {k for k in frozen_names(self) if k.startswith("trunk.")} if options.folder else set()
            )

    # ---- weights

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What is not in `net.folder`."""
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k not in self.elsewhere}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """UserError: `net.folder` has other weights than those it was learnt on."""
        if "base" in state_dict and int(state_dict["base"]) != int(self.base):
            raise UserError(
                f"net.folder {self.options.folder} holds other weights than this model was learnt on; put "
                "those back"
            )
        rest = {k: v for k, v in super().state_dict().items() if k in self.elsewhere}
        return super().load_state_dict({**state_dict, **rest}, strict, assign)

    # ---- pieces

    def encode(self, clip: Tensor) -> Tensor:
        """Frames as patches [B,T,V 48,g,g], T = 1 + 4 n -> latents [B,Z,1+n,h,V w] of unit variance, the mean
        of their distribution."""
        return (self.vae.encode(pictures(clip)).latent_dist.mode() - self.mean) / self.std

    def decode(self, z: Tensor) -> Tensor:
        """The inverse, as near as the autoencoder comes: [B,T,V 48,g,g]."""
        return patches(self.vae.decode(z * self.std + self.mean).sample, len(self.spec.control.views))

    def told(self, state: Tensor, states: Tensor, actions: Tensor, task: Tensor | None) -> Tensor:
        """State before [B,S], those after each step [B,C,S], actions [B,C,A], instructions int64[B] -> tokens
        [B,C,D]."""
        p = self.proprio
        each = None if task is None else task[:, None].expand(actions.shape[:2])
        motion = ((states - state[:, None]) / p.std).clamp(-10, 10)
        return self.tokens(standard(p, state), motion, p.commanded(actions, each))

    def velocity(self, x: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        """v^ [B,Z,L,h,w] of latents x at times t [B,L] of each of their frames."""
        h, w = x.shape[3] // self.patch[1], x.shape[4] // self.patch[2]
        with products(self.options.dtype, x.device):
            return self.trunk(x, (TIME * t).repeat_interleave(h * w, 1), tokens, return_dict=False)[0].float()

    def known(self, carry: Mapping[str, Tensor]) -> Tensor:
        """Latents [B,Z,1+H,h,w] of the first frame and the history."""
        return torch.cat([self.encode(carry["first"][:, None]), self.encode(carry["past"])], 2)

    def sample(self, known: Tensor, tokens: Tensor, noise) -> Tensor:
        """(2): latents to come [B,Z,C/4,h,w]; `noise(k)` gives the k-th draw of their shape."""
        o, (b, _, held) = self.options, known.shape[:3]
        table = flow_table(o.steps, "cps", o.noise_level)
        x = noise(0)
        for k in range(o.steps):
            t = torch.zeros(b, held + x.shape[2], device=x.device)
            t[:, held:] = float(table.t[k])
            v = self.velocity(torch.cat([known, x], 2), t, tokens)[:, :, held:]
            x = table.a[k] * x + table.b[k] * v
            if table.s[k] > 0:
                x = x + table.s[k] * noise(k + 1)
        return x

    def judged(self, frame: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Heads [B,3] of one step each; `action` as `Latent.commanded` gives it."""
        return self.heads(frame, standard(self.proprio, state), action)

    # ---- the protocol

    def begin(self, last: Tensor) -> Carry:
        """What is kept of frames [B,V 48,g,g] that episodes begin with."""
        return {"first": last, "past": last[:, None].repeat(1, self.options.past, 1, 1, 1)}

    def start(self, obs: Mapping[str, np.ndarray], keys: np.ndarray) -> Carry:
        """Carry of lanes that begin at rest with the frames obs["image/<view>"] uint8 [N,h,w,3] and
        obs["state"] [N,S]."""
        kept = self.begin(patches_of(pictures_of(obs, self.spec), self.spec.control.views))
        return self.proprio.start(obs, keys) | kept | {"doubt": torch.zeros(len(keys))}

    @at_home
    def step(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        return in_chunks(self.chunk, self.options.chunk, carry, actions)

    def chunk(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        e, c, views = actions.shape[1], self.options.chunk, self.spec.control.views
        arm, p = self.proprio.step({k: v for k, v in carry.items() if k not in OF_FRAMES}, actions)
        tokens = self.told(carry["state"], padded(p.obs["state"], c), padded(actions, c), carry.get("task"))
        known = self.known(carry)
        shape = (known.shape[1], c // FACTOR, *known.shape[3:])
        z = self.sample(known, tokens, lambda k: lane_noise(carry, k, shape))
        frames = self.decode(torch.cat([known[:, :, 1:], z], 2))[:, -c:][:, :e].clamp(-1, 1)
        out, unsure, kept = outcomes(self, carry, actions, frames, p.obs["state"], p.uncertainty)
        kept |= {
            "first": carry["first"],
            "past": torch.cat([carry["past"], frames], 1)[:, -self.options.past :],
        }
        chance = (out[..., 1:] - self.shift).sigmoid()
        obs = dict(p.obs) | {
            f"image/{v}": to_frames(x) for v, x in zip(views, frames.split(48, 2), strict=True)
        }
        return arm | kept, Prediction(
            obs, out[..., 0] * self.proprio.gain, chance[..., 1], chance[..., 0], unsure
        )


OF_FRAMES = ("first", "past", "doubt")  # of the carry; the rest is the arm's


def pictures(clip: Tensor) -> Tensor:
    """Patches [B,T,V 48,g,g] as the autoencoder's pictures [B,3,T,h,V w], cameras side by side."""
    x = F.pixel_shuffle(clip.unflatten(2, (-1, 48)), PATCH)  # [B,T,V,3,h,w]
    return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).contiguous()


def patches(x: Tensor, views: int) -> Tensor:
    """The inverse of `pictures`."""
    x = x.unflatten(4, (views, -1)).permute(0, 2, 4, 1, 3, 5)
    return F.pixel_unshuffle(x, PATCH).flatten(2, 3)


def build(spec: WorldSpec, options: dict) -> WanVideo:
    """The untrained model of a folder's JSON."""
    if (folder := options["folder"]) and not Path(folder).is_dir():
        raise UserError(
            f"this world model adapts the weights of {Path(folder).absolute()}, which are not there: put the "
            "folder back, or a link to it"
        )
    inner = {"proprio": latent_options(options["proprio"]), "lora": LoraOptions(**options["lora"])}
    return WanVideo(spec, DiffusersOptions(**dict[str, Any](options | inner)))
