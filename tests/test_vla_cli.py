"""`robo_rl vla`: the commands of docs/howto/vla.md, run as they stand there, and what a mistake says."""

import re
import shlex
from pathlib import Path

import pytest
from test_vla_weights import folder_of_lerobot
from vla_goldens import golden_file, weights

from robo_rl.cli import main

PAGE = (Path(__file__).parent.parent / "docs/howto/vla.md").read_text()
SHOWN = [
    shlex.split(line.split("#")[0])[1:]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    for line in block.splitlines()
]


def said(capsys, *argv: object) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)"""
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in argv])
    out = capsys.readouterr()
    return int(e.value.code or 0), out.out, out.err


def test_the_commands_of_the_page_run_in_their_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder_of_lerobot(tmp_path / "pi05")
    config = tmp_path / "pi05" / "config.json"
    config.write_text(config.read_text().replace('"chunk_size": 50', '"chunk_size": 10'))
    answers = []
    assert {argv[1] for argv in SHOWN} == {"check", "convert", "compare"}
    for argv in SHOWN:
        code, out, err = said(capsys, *argv)
        assert code == (argv[1] == "check") and not err, (argv, err)  # the tiny folder has no tokeniser
        answers.append(out)
    assert "pi05, keys in layout lerobot" in answers[0] and "missing    " in answers[0]
    assert (
        "pi05 from layout lerobot to robo_rl: 93 tensors" in answers[1]
        and "copied beside it: config.json" in answers[1]
    )
    assert "largest difference: 0 in" in answers[3]
    assert "layer/trunk.layers.0" in answers[5] and "layer/expert.layers.1" in answers[5]


def test_the_python_of_the_page_runs():
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], scope)
    assert scope["chunk"].shape == (1, 10, 32)


def test_a_difference_above_the_tolerance_is_exit_code_1(capsys):
    argv = ["vla", "compare", weights("pi0"), "--golden", golden_file("pi0")]
    assert said(capsys, *argv, "--tolerance", "1e-5")[0] == 0
    code, out, _ = said(capsys, *argv, "--tolerance", "1e-5", "--dtype", "bf16")
    assert code == 1 and "loss_map" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("vla chek x", "unknown vla command 'chek'; did you mean 'check'?"),
        ("vla check nowhere", "nowhere does not exist"),
        ("vla convert nowhere there", "nowhere does not exist"),
        ("vla compare {pi0}", "give --golden FILE to compare with, or --record FILE"),
        ("vla compare {pi0} --golden nowhere", "nowhere does not exist"),
        ("vla compare {pi0} --golden x --tolerance -1", "--tolerance must be in [0, 1e+06], got -1.0"),
        ("vla compare {pi0} --golden x --dtype fp8", "fp8"),
        ("vla compare {pi0} --golden {pi0} --device tpu", "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (
            "vla convert {pi0} {out} --to openpy",
            "unknown layout of pi0 'openpy'; did you mean 'openpi'? Allowed: openpi,",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, says, tmp_path, capsys):
    code, out, err = said(capsys, *argv.format(pi0=weights("pi0"), out=tmp_path / "out").split())
    assert code == 2 and not out and err.startswith("robo_rl: ") and err.count("\n") == 1
    assert says in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "part", ["", "checkpoints/step_000000000000", "checkpoints/step_000000000000/policy.safetensors"]
)
def test_a_run_of_a_small_policy_is_told_apart_and_what_goes_with_it(part, tmp_path, capsys):
    at = tmp_path / "run" / "checkpoints" / "step_000000000000"
    at.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text('{"config": {"policy": {"kind": "diffusion"}}}')
    (at / "meta.json").write_text('{"policy": {"options": {"kind": "diffusion"}}}')
    (at / "policy.safetensors").write_bytes(b"weights")
    for argv in (["check"], ["convert", tmp_path / "out"], ["compare", "--golden", "x"]):
        code, _, err = said(capsys, "vla", argv[0], tmp_path / "run" / part, *argv[1:])
        assert code == 2 and "whose policy is of --policy.kind diffusion, no vision-language" in err
        assert f"robo_rl eval {tmp_path / 'run'}, robo_rl deploy" in err and err.count("\n") == 1
    if part:
        code, _, err = said(capsys, "train", "--policy", tmp_path / "run" / part)
        assert (
            code == 2 and "is a run of robo_rl or a part of one; begin with its policy by --init RUN" in err
        )
