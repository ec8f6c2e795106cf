"""Processors of folders that other programs wrote: LeRobot's policies, openpi's norm_stats.json, OpenVLA's
dataset_statistics.json.

LeRobot: config.json, policy_preprocessor.json with the safetensors that its steps name (statistics as
`action.mean`); in older folders the statistics are among the weights
(`normalize_inputs.buffer_observation_state.mean`). openpi: norm_stats.json, in the folder or below assets/.
OpenVLA-OFT: config.json and dataset_statistics.json (q01 and q99 of "action" and "proprio", and a mask of the
axes that they are of). Nothing is executed or downloaded; a tokeniser has to lie in the folder or be given.
Formats as in https://github.com/huggingface/lerobot (src/lerobot/processor),
https://github.com/Physical-Intelligence/openpi.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.errors import UserError
from robo_rl.files import read_json
from robo_rl.normalise import AxisNormaliser
from robo_rl.policies.vla import tokeniser as tokenisers
from robo_rl.policies.vla.processor import FAMILIES, NAME, Processor, Statistics, of_family

PRE, CONFIG, OPENPI, OPENVLA = (
    "policy_preprocessor.json",
    "config.json",
    "norm_stats.json",
    "dataset_statistics.json",
)
KIND = {"MEAN_STD": "mean_std", "QUANTILES": "quantiles", "MIN_MAX": "min_max", "IDENTITY": "identity"}
LEROBOT_EPS, OPENPI_EPS = 1e-8, 1e-6
# steps of LeRobot's preprocessor of a GR00T that normalise
GROOT = ("groot_pack_inputs", "groot_n1_7_pack_inputs")
SPLIT = {"observation.state": "state", "action": "action", "actions": "action", "state": "state"}


def from_folder(
    folder: "str | Path", words: "str | Path" = "", need_statistics: bool = True, **changes: Any
) -> Processor:
    """The processor in a folder: ours, LeRobot's or openpi's.

    words: where the tokeniser is, if not in the folder; need_statistics: whether LeRobot's may lack them (a
    base model, whose robot is yet to come), if they are taken from elsewhere; changes: fields of
    ProcessorOptions that the folder does not say (openpi says the statistics alone: family and views at
    least). UserError: nothing there to read, or statistics are absent.
    """
    folder = Path(folder)
    if (folder / NAME).is_file():
        return Processor.load(folder, tokenisers.load(words) if words else None)
    if (folder / CONFIG).is_file() and "type" in read_json(folder / CONFIG):
        return _lerobot(folder, words, changes, need_statistics)
    if found := sorted({*folder.glob(OPENPI), *folder.glob(f"assets/**/{OPENPI}")}):
        if len(found) > 1:
            places = ", ".join(str(p.parent.relative_to(folder)) for p in found[:4])
            raise UserError(
                f"{folder} has {len(found)} files {OPENPI} ({places}); name the folder of one robot"
            )
        return _openpi(found[0], words or folder, changes)
    if (folder / OPENVLA).is_file():
        return _openvla(folder, words or folder, changes)
    raise UserError(
        f"{folder} does not say what its model expects: it has no {NAME} (ours), no {CONFIG} with {PRE} "
        f"(LeRobot), no {OPENPI} (openpi) and no {OPENVLA} (OpenVLA)"
    )


def is_bare(folder: Path) -> bool:
    """Whether the folder is NVIDIA's of a GR00T: a config.json of the network alone, which says nothing of
    cameras and statistics."""
    kind = read_json(folder / CONFIG).get("model_type", "") if (folder / CONFIG).is_file() else ""
    return str(kind).lower().startswith("gr00t")


def read_openpi(path: Path) -> Statistics:
    """Statistics of a norm_stats.json."""
    document = read_json(path)
    try:
        return {
            SPLIT[key]: {s: x for s, x in per.items() if x is not None}
            for key, per in document["norm_stats"].items()
            if key in SPLIT
        }
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is no norm_stats.json of openpi ({e!r})") from None


def as_openpi(processor: Processor) -> dict[str, Any]:
    """The norm_stats.json of a processor, whatever the kind of its statistics: by mean and std, and by
    quantiles, openpi computes the same numbers."""

    def told(norm: AxisNormaliser) -> dict[str, list[float]]:
        shift, scale = norm.shift.detach().cpu().double(), norm.scale.detach().cpu().double()
        mean, low = shift + norm.offset * scale, shift - (1 - norm.offset) * scale
        numbers = {"mean": mean, "std": scale - OPENPI_EPS, "q01": low, "q99": low + 2 * scale - OPENPI_EPS}
        return {name: x.tolist() for name, x in numbers.items()}

    return {"norm_stats": {"state": told(processor.state_norm), "actions": told(processor.action_norm)}}


def _openpi(path: Path, words: "str | Path", changes: Mapping[str, Any]) -> Processor:
    statistics = read_openpi(path)
    family = str(changes.get("family", "pi0"))
    sizes = {
        key: len(next(iter(statistics[key].values()))) for key in ("state", "action") if statistics.get(key)
    }
    options = of_family(family, **{**sizes, **{k: v for k, v in changes.items() if k != "family"}})
    made = Processor(options, tokenisers.load(words))
    made.take(statistics, OPENPI_EPS, plus=True, where=str(path))
    return made


def read_openvla(path: Path) -> Statistics:
    """Statistics of a dataset_statistics.json of one data set; an axis that its mask leaves out passes
    through."""
    document = read_json(path)
    if len(document) != 1:
        raise UserError(
            f"{path} has statistics of {len(document)} data sets ({', '.join(list(document)[:4])}); keep the "
            "robot's own alone"
        )
    try:
        [per] = document.values()
        out: dict[str, dict[str, Any]] = {}
        for key, name in (("proprio", "state"), ("action", "action")):
            if key in per:
                low, high = (np.asarray(per[key][s], np.float64) for s in ("q01", "q99"))
                mask = np.asarray(per[key].get("mask", np.ones(len(low))), bool)
                out[name] = {"q01": np.where(mask, low, -1.0), "q99": np.where(mask, high, 1.0)}
        return out
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise UserError(f"{path} is no dataset_statistics.json of OpenVLA ({e!r})") from None


def _openvla(folder: Path, words: "str | Path", changes: Mapping[str, Any]) -> Processor:
    statistics = read_openvla(folder / OPENVLA)
    absent = [] if "state" in statistics else ["state"]
    sizes = {key: len(per["q01"]) for key, per in statistics.items()}
    options = of_family(
        "openvla_oft",
        **{
            **sizes,
            **({"state_kind": "identity"} if absent else {}),
            **{k: v for k, v in changes.items() if k != "family"},
        },
    )
    made = Processor(options, tokenisers.load(words))
    made.take(statistics, OPENPI_EPS, plus=True, where=str(folder / OPENVLA))
    return made


def _lerobot(
    folder: Path, words: "str | Path", changes: Mapping[str, Any], need_statistics: bool
) -> Processor:
    config = read_json(folder / CONFIG)
    family = str(config["type"])
    family = "groot_n17" if family == "groot" and "1.7" in str(config.get("model_version", "")) else family
    if family not in FAMILIES:
        raise UserError(
            f"{folder / CONFIG} is of a policy of type {config['type']!r}; processors are known for "
            f"{', '.join(FAMILIES)}"
        )
    try:
        features = {**config.get("input_features", {}), **config.get("output_features", {})}
        settings = _settings(config, features)
        steps = read_json(folder / PRE)["steps"] if (folder / PRE).is_file() else []
        settings |= _steps(steps, settings)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
        raise UserError(f"{folder} is no policy folder that LeRobot wrote ({e!r})") from None
    made = Processor(of_family(family, **{**settings, **changes}), tokenisers.load(words or folder))
    statistics = _lerobot_statistics(folder, steps)
    if statistics or need_statistics:
        made.take(statistics, _eps(steps), where=str(folder))
    return made


def _settings(config: Mapping[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ProcessorOptions that a config.json of LeRobot says."""
    kinds = {key: KIND[str(mode)] for key, mode in config.get("normalization_mapping", {}).items()}
    views = tuple(
        key.removeprefix("observation.images.")
        for key, f in features.items()
        if f["type"] == "VISUAL" and ".empty_camera_" not in key
    )
    out: dict[str, Any] = {
        "views": views,
        "slots": max(len(views) + int(config.get("empty_cameras", 0)), 1),
        "state": int(features["observation.state"]["shape"][0]),
        "action": int(features["action"]["shape"][0]),
        "width": max(int(config.get(key, 32)) for key in ("max_action_dim", "max_state_dim")),
        "padded_state_text": config["type"] == "pi05",
    }
    if config["type"] != "groot":  # whose preprocessor normalises by itself, whatever is said here
        out |= {f"{k.lower()}_kind": kinds[k] for k in ("STATE", "ACTION") if k in kinds}
    if size := config.get("resize_imgs_with_padding") or config.get("image_resolution"):
        out["image_size"] = int(size[0])
    if length := config.get("tokenizer_max_length"):
        out["prompt"] = int(length)
    return out


def _steps(steps: list[dict], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ProcessorOptions that the steps of a policy_preprocessor.json say."""
    out: dict[str, Any] = {}
    for step in steps:
        name, config = step.get("registry_name"), step.get("config", {})
        if name == "tokenizer_processor":
            out["prompt"] = int(config["max_length"])
        elif name == "pi05_prepare_state_tokenizer_processor_step":
            # a state of fewer numbers than the model's is told as it is
            out["padded_state_text"] = int(config.get("max_state_dim", settings["width"])) > settings["state"]
        elif name == "normalizer_processor":
            kinds = {k: KIND[str(v)] for k, v in config["norm_map"].items()}
            out |= {f"{k.lower()}_kind": kinds[k] for k in ("STATE", "ACTION") if k in kinds}
        elif str(name).startswith(GROOT):
            if "relative" in str(config.get("modality_config", "")).lower():
                raise UserError(
                    f"{name} makes actions relative to the state by groups of axes, which is not read here"
                )
            out |= (
                {}
                if config.get("normalize_min_max", True)
                else {"state_kind": "identity", "action_kind": "identity"}
            )
        elif name == "relative_actions_processor" and config.get("enabled"):
            names, kept = (
                config.get("action_names"),
                [str(x).lower() for x in config.get("exclude_joints") or ()],
            )
            n = settings["action"]
            names = [*map(str, names or ()), *[""] * n][:n]
            out["delta"] = tuple(not (name and any(k in name.lower() for k in kept)) for name in names)
        elif name == "rename_observations_processor":
            back = {
                new.removeprefix("observation.images."): old.removeprefix("observation.images.")
                for old, new in config.get("rename_map", {}).items()
            }
            out["views"] = tuple(back.get(view, view) for view in settings["views"])
    return out


def _eps(steps: list[dict]) -> float:
    return next(
        (
            float(s["config"].get("eps", LEROBOT_EPS))
            for s in steps
            if s.get("registry_name") == "normalizer_processor"
        ),
        LEROBOT_EPS,
    )


def _lerobot_statistics(folder: Path, steps: list[dict]) -> Statistics:
    """From the file that the normaliser's step names, or from among the weights."""
    from safetensors import SafetensorError, safe_open

    out: dict[str, dict[str, Any]] = {}

    def put(key: str, stat: str, value) -> None:
        if key in SPLIT:
            out.setdefault(SPLIT[key], {})[stat] = np.asarray(value, np.float64)

    step = next(
        (s for s in steps if str(s.get("registry_name")).startswith(("normalizer_processor", *GROOT))), {}
    )
    path = folder / Path(str(step.get("state_file", "model.safetensors"))).name
    try:
        with safe_open(str(path), "numpy") as f:
            for name in f.keys():  # noqa: SIM118 - no mapping
                parts = name.split(".")
                if path.name == "model.safetensors":
                    if (
                        len(parts) >= 3
                        and parts[-2].startswith("buffer_")
                        and parts[-3] != "unnormalize_outputs"
                    ):
                        put(
                            parts[-2].removeprefix("buffer_").replace("_", ".", 1),
                            parts[-1],
                            f.get_tensor(name),
                        )
                else:
                    put(".".join(parts[:-1]), parts[-1], f.get_tensor(name))
    except (OSError, SafetensorError) as e:
        raise UserError(
            f"{path}: the statistics of its normaliser cannot be read ({e}); copy the whole folder"
        ) from None
    return out
