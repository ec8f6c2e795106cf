"""What docs/ says exists: links, images, pages, files, options, methods. `.ci/run` builds the site with
`mkdocs build --strict`."""

import importlib
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from robo_rl.cli import COMMANDS
from robo_rl.options import ALGOS, RL_OPTIONS

ROOT = Path(__file__).parent.parent
PAGES = [
    Path("README.md"),
    Path("CONTRIBUTING.md"),
    *sorted(p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md")),
]
NAV = re.findall(r"(?m)^ +- (?:.*: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text())
PATHS = re.compile(r"`((?:robo_rl|sims|controllers|world_models|tests|launch)/[\w./-]*[\w-])/?`")


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("gen_reference", ROOT / "docs/gen_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known_options(generator) -> set[str]:
    return generator.option_names() | {"--strict", "--upgrade"}  # the last two: of mkdocs and pip


def anchors(text: str) -> list[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return [
        re.sub(r"[^a-z0-9_ -]", "", h.lower()).strip().replace(" ", "-")
        for h in re.findall(r"(?m)^#+ (.*)$", text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_and_image_leads_somewhere(page, generator):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if (
            target.is_relative_to(ROOT / "docs")
            and str(target.relative_to(ROOT / "docs")) in generator.GENERATED
        ):
            continue
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), f"{link}: {anchors(target.read_text())}"


def test_every_page_is_in_the_navigation_once(generator):
    # which results.md lists
    pages = [str(p.relative_to("docs")) for p in PAGES[2:] if p.parent.name != "results"]
    assert sorted(NAV) == sorted([*pages, *generator.GENERATED])


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_and_option_that_a_page_names_exists(page, known_options):
    text = (ROOT / page).read_text()
    for path in PATHS.findall(text):
        assert (ROOT / path).exists(), path
    if page.name in ("results.md", "CONTRIBUTING.md") or page.parent.name == "results":
        return  # options of earlier commits, and of pytest and git
    if page.name == "from_others.md":
        text = re.sub(r"(?m)^\|[^|]*\|", "|", text)  # the left column is of other projects
    shown = re.findall(
        r"(?<![\w-])(--[a-z][\w.-]*\w)(?![\w.]*…)", "\n".join(re.findall(r"`([^`\n]+)`", text))
    )
    assert not {*shown} - known_options


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_places_in_a_file_is_defined_there(page):
    """Such as `TASKS` in `sims/mujoco/names.py`."""
    text = " ".join((ROOT / page).read_text().split())
    for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", text):
        assert re.search(rf"(?m)^(def |class )?{name}\b", (ROOT / path).read_text()), (name, path)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_that_a_page_names_exists(page):
    """Also those within a sentence or a table, which tests/test_readme.py does not run."""
    for command, sub in re.findall(r"`robo_rl ([a-z][\w-]*)(?: ([a-z]\w*))?", (ROOT / page).read_text()):
        assert command in COMMANDS, command
        module = importlib.import_module(f"robo_rl.cli.{command.replace('-', '_')}")
        assert not hasattr(module, "SUBCOMMANDS") or not sub or sub in module.SUBCOMMANDS, (command, sub)


def test_every_method_has_a_page_with_its_command_and_presets(generator):
    for algo in ALGOS:
        text = (ROOT / f"docs/methods/{algo}.md").read_text()
        assert (
            re.search(rf"```bash\nrobo_rl train .*--algo {algo}\b", text)
            and f"<!-- presets of {algo} -->" in text
        ), algo
        table = generator.on_page_markdown(text)
        assert table.count("\n| `--") >= (algo != "bc"), algo
        assert f"[{algo}]({algo}.md)" in (ROOT / "docs/methods/index.md").read_text()


@pytest.mark.parametrize("topic", ["tasks", "arm"])  # with a picture, and without one
def test_a_page_of_results_is_made_anew_with_its_picture(generator, topic):
    there = ROOT / f"docs/results/{topic}.md"
    page = SimpleNamespace(file=SimpleNamespace(src_uri=f"results/{topic}.md", abs_src_path=str(there)))
    made, picture = generator.on_page_markdown("", page=page), f"]({topic}.svg)"
    assert made.startswith(there.read_text().splitlines()[0])
    assert (picture in made) == (picture in there.read_text()) == there.with_suffix(".svg").exists()


def test_the_table_of_presets_has_the_values_that_the_command_uses(generator):
    lines = generator.preset_table("reinflow").splitlines()
    assert (
        "| `--rl.clip-low` | 0.2 | 0.2 | 0.2 | 0.01 |" in lines
        and "| `--envs` | 256 | 128 | 128 | 40 |" in lines
    )


def test_the_page_of_commands_has_every_option_with_its_default_and_meaning(generator):
    page = generator.cli_page()
    assert "| `--bc.noises` | int | `1` | Draws of time and noise for each demonstrated chunk" in page
    assert "| `RUN` | str | required | Run folder, or a checkpoint folder inside one. |" in page
    assert "| `--policy.noise` | `sde`, `cps`, `learned` | `sde` | Exploration of a flow chain" in page
    assert "## robo_rl wm judge" in page and "### Options of hil_serl" in page and "wm:&lt;folder" in page
    for options in RL_OPTIONS.values():
        for field in options.__dataclass_fields__:
            assert f"`--rl.{field.replace('_', '-')}" in page, field


def test_an_option_is_not_broken_after_its_dashes_on_the_site(generator):
    html = '<h3 id="--starts"><code>--rl.lr 1</code></h3><a href="x--y">a--b</a><!-- --out -->'
    made = '<span class="option">--rl.lr</span>'
    assert generator.on_page_content(html) == html.replace("--rl.lr", made)
