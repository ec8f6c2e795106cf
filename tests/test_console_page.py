"""The console's page in a real browser, at two sizes: what is in view, where keys act, what is said when
something is wrong.
"""

import json
import time

import pytest
from browser import BINARY, Browser
from consoles import console, trained

from robo_rl.human.console.access import exchange_address

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs chromium")
SIZES = [(1280, 800), pytest.param((1920, 1080), marks=pytest.mark.slow)]
CONTROLS = ["#take", "#pause", "#rewind", "#recovery", "#correction", "#good", "#bad", "#speed"]
IMPORTANT = [
    *CONTROLS,
    "#holds",
    "#does",
    "#delay",
    "#detail",
    "#title",
    "#task",
    "#keys tr:last-child",
    "#account tr:last-child",
    "#who",
    *(f".robot:nth-child({k})" for k in (1, 2, 3)),
    "figure:nth-child(1) img",
    "figure:nth-child(2) img",
]
CONTRAST = """(() => {
  const channel = c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const read = text => text.match(/[\\d.]+/g).map(Number);
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('svg') || e.tagName === 'FIGCAPTION' || !e.offsetParent) continue;
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    let p = e, back = [0, 0, 0, 0];
    while (p && (back[3] === 0)) { const c = read(getComputedStyle(p).backgroundColor); back = c.length < 4 ? [...c,
    1] : c; p = p.parentElement; }
    const [a, b] = [light(read(getComputedStyle(e).color)), light(back)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) low.push(`${e.tagName} ${e.id} ${e.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return low;
})()"""  # noqa: E501


@pytest.fixture(scope="module", params=SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def page(request, tmp_path_factory):
    """(browser with ann's page, bob's address)"""
    run = trained(tmp_path_factory)
    with (
        console(run, "--robots", "3", "--speed", "0.3", "--max-delay", "4", "--patience", "600") as (
            _,
            addresses,
        ),
        Browser(tmp_path_factory.mktemp("profile") / "p", request.param) as b,
    ):
        b.call(
            "Emulation.setDeviceMetricsOverride",
            width=request.param[0],
            height=request.param[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        b.call("Emulation.setFocusEmulationEnabled", enabled=True)
        b.open(addresses["ann"])
        b.until(
            "window.__console && __console.state() && __console.counts()[2] > 2 && "
            "[...document.querySelectorAll('figure img')].every(i => i.naturalWidth)",
            120,
        )
        yield b, addresses["bob"]


@pytest.fixture
def b(page):
    """The browser; nothing is held, robot 0 is selected."""
    b, _ = page
    b.key("Escape")
    b.until("__console.held()[1] === 0 && !__console.state().robots.some(r => r.number)")
    b.key("0")
    b.until("__console.at() === 0 && document.activeElement.classList.contains('robot')")
    return b


def take(b, robot=0):
    b.key(str(robot))
    b.key("Enter")
    b.until(f"__console.held()[0] === {robot} && __console.held()[1] > 0")


def drive(b, key="w"):
    """Press a key until the robot is driven."""
    b.key(key, up=False)
    b.until("__console.state().robots[__console.at()].phase === 'correction'")
    b.key(key, down=False)


def place(b, selector):
    """[x, y, right, bottom] of an element."""
    return b.js(
        f"(()=>{{const r=document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        "return [r.left,r.top,r.right,r.bottom]})()"
    )


def text(b, selector):
    return b.js(f"document.querySelector({json.dumps(selector)}).innerText")


def test_everything_that_matters_is_in_view_without_scrolling(b):
    for held in (False, True):
        if held:
            take(b)
        width, height = b.js("[innerWidth, innerHeight]")
        for selector in IMPORTANT:
            x, y, right, bottom = place(b, selector)
            assert x >= 0 and y >= 0 and right <= width and bottom <= height and right > x and bottom > y, (
                selector
            )
            covered = b.js(
                f"(()=>{{const e=document.querySelector({json.dumps(selector)}), "
                f"h=document.elementFromPoint({(x + right) / 2},{(y + bottom) / 2});"
                "return !(e.contains(h) || h.contains(e) || h.parentNode.contains(e))})()"
            )
            assert not covered, selector
        assert b.js(
            "['html', 'aside', '#robots'].every(s => { const e = document.querySelector(s);"
            " return e.scrollHeight <= e.clientHeight + 1 && e.scrollWidth <= e.clientWidth + 1; })"
        )


def test_the_cameras_show_the_whole_picture_large_with_the_axes_on_it(b):
    least = 440 if b.js("innerWidth") < 1500 else 700
    for k, view in enumerate(("front", "wrist"), 1):
        x, y, right, bottom = place(b, f"figure:nth-child({k}) img")
        assert right - x >= least and right - x == pytest.approx(bottom - y, rel=0.01)
        assert text(b, f"figure:nth-child({k}) figcaption") == view
        assert (
            b.js(f"getComputedStyle(document.querySelector('figure:nth-child({k}) img')).objectFit")
            == "contain"
        )
        b.until(f"document.querySelector('figure:nth-child({k}) img').naturalWidth === 480")
    b.until(
        "['W forward', 'S back', 'A left', 'D right', 'Q up', 'E down'].every(w => "
        "document.querySelector('figure svg').textContent.includes(w))"
    )
    assert b.js("getComputedStyle(document.querySelector('.robot img')).objectFit") == "contain"


def test_on_a_phone_nothing_is_cut_off_and_the_keys_of_the_table_move_the_robot(b):
    size = b.js("[innerWidth, innerHeight]")
    try:
        b.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        b.call("Emulation.setTouchEmulationEnabled", enabled=True)
        b.until("document.documentElement.scrollWidth === 390 && innerWidth === 390")
        for selector in ("figure:nth-child(1) img", "figure:nth-child(2) img"):
            x, y, right, bottom = place(b, selector)
            assert x >= 0 and right <= 390 and bottom < 500 and right - x > 150, selector
        x, y, right, bottom = place(b, "kbd[data-key=w]")
        assert right - x >= 40 and bottom - y >= 30 and bottom <= 844
        b.click("#take")
        b.until("__console.held()[0] === 0 && __console.held()[1] > 0")
        for told in ("", "You hold robot 0: hand it back (Esc) before you look at another."):
            b.js(f"say({told!r}, true)")  # no key moves away from under a finger
            assert place(b, "kbd[data-key=w]") == [x, y, right, bottom]
            assert b.js("(e => e.scrollHeight <= e.clientHeight)(document.querySelector('#news'))")
        at = [{"x": (x + right) / 2, "y": (y + bottom) / 2}]
        b.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=at)
        b.until("__console.state().robots[0].phase === 'correction'")
        time.sleep(1.5)  # longer than a long press, which must not end the touch
        assert b.js("document.querySelector('kbd[data-key=w]').className") == "down"
        assert place(b, "kbd[data-key=w]") == [x, y, right, bottom]
        b.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        b.until("__console.state().robots[0].phase === 'pause'")  # and it stands still where nobody moves it
    finally:
        b.call("Emulation.setTouchEmulationEnabled", enabled=False)
        b.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )


def test_tab_to_a_robot_and_enter_takes_that_robot_over(b):
    for _ in range(2):
        b.key("Tab")
    assert b.js("document.activeElement.innerText").startswith("Robot 2") and b.js("__console.at()") == 2
    b.key("Enter")
    b.until("__console.held()[1] > 0")
    b.until("__console.state().robots[2].holder === 'ann'")
    assert b.js("__console.held()[0]") == 2 and b.js("__console.state().robots[0].holder") == ""
    assert text(b, "#holds") == "You hold robot 2" and text(b, "#title") == "Robot 2"


def test_while_a_robot_is_held_no_other_is_looked_at_and_tab_leads_to_its_controls(b):
    take(b, 1)
    b.key("2")
    assert "You hold robot 1" in text(b, "#alert") and b.js("__console.at()") == 1
    b.click(".robot:nth-child(1)")
    assert b.js("__console.at()") == 1
    b.until("document.activeElement.innerText.startsWith('Robot 1')")
    b.key("Tab")
    assert b.js("document.activeElement.id") == "take"


def test_digits_choose_robots_by_the_number_that_is_shown(b):
    for k in (1, 2, 0):
        b.key(str(k))
        assert text(b, "#title") == f"Robot {k}" and b.js("document.activeElement.innerText").startswith(
            f"Robot {k}"
        )
    b.key("7")
    assert text(b, "#alert") == "There is no robot 7: they are 0 to 2."


def test_after_a_click_on_the_slider_keys_still_act_and_escape_hands_back(b):
    take(b)
    b.click("#speed")
    b.until("document.activeElement.classList.contains('robot')")
    drive(b)
    b.js("document.querySelector('#speed').focus()")  # by Tab
    b.until("!document.querySelector('#inactive').hidden")
    assert "Arrow keys set the speed" in text(b, "#inactive")
    b.key("Escape")
    b.until("__console.held()[1] === 0 && document.querySelector('#inactive').hidden")
    assert text(b, "#holds") == "You hold nothing"


@pytest.mark.parametrize("selector", ["#pause", "#rewind", "#theme", "#bar", "figure img", "#account"])
def test_no_click_takes_the_keyboard_away(b, selector):
    take(b, 1)
    b.click(selector)
    b.until("document.activeElement.classList.contains('robot')")
    if selector == "#pause":
        b.click(selector)
    b.key("Escape")
    b.until("__console.held()[1] === 0")


def test_a_keyboard_that_is_not_active_is_said_large_and_the_robot_stands_still(b):
    take(b)
    b.key("w", up=False)
    b.until("__console.state().robots[0].phase === 'correction'")
    b.js("window.dispatchEvent(new Event('blur'))")
    b.until("__console.state().robots[0].phase === 'pause'")
    x, y, right, bottom = place(b, "#inactive")
    assert (
        right - x > 300
        and bottom - y > 50
        and float(b.js("getComputedStyle(document.querySelector('#inactive')).fontSize")[:-2]) >= 24
    )
    assert text(b, "#inactive") == "Keyboard not active: click here" and "Keyboard not active" in text(
        b, "#does"
    )
    b.click("#inactive")
    b.until(
        "document.querySelector('#inactive').hidden && document.activeElement.classList.contains('robot')"
    )


def test_refusals_stand_in_the_status_bar(b, page):
    from websockets.sync.client import connect

    at, headers = exchange_address(page[1])
    b.key("b")
    assert text(b, "#alert") == "Take robot 0 over first (Enter)."
    with connect(at, additional_headers=headers, open_timeout=60, max_size=None) as bob:
        bob.send(json.dumps({"t": "take", "robot": 1}))
        b.until("__console.state().robots[1].holder === 'bob'")
        b.key("1")
        b.key("Enter")
        b.until("document.querySelector('#alert').innerText === 'robot 1 is held by bob'")
        x, _, right, bottom = place(b, "#alert")
        assert right > x and bottom <= place(b, "#bar")[3]
        assert text(b, "#take").startswith("Held by bob")


def test_the_delay_has_colours_and_holds_the_robot_when_it_is_too_great(b):
    b.until("document.querySelector('#link').className === 'ok'")
    colour = "getComputedStyle(document.querySelector('#link')).backgroundColor"
    seen = {b.js(colour)}
    take(b)
    drive(b)
    b.js(
        "(() => { const ws = __console.ws(), real = ws.send.bind(ws); window.__late = 0; ws.send = m => "
        "__late ? setTimeout(() => real(m), __late) : real(m); window.__mend = () => { ws.send = real; }; "
        "})()"
    )
    for late, name in ((1700, ("warn", "bad")), (5500, ("held",))):
        b.js(f"window.__late = {late}")
        b.until(f"{json.dumps(name)}.includes(document.querySelector('#link').className)")
        seen.add(b.js(colour))
        # seconds, not milliseconds
        assert b.js("parseFloat(document.querySelector('#delay').innerText)") >= 1
    assert "too slow" in b.js("getComputedStyle(document.querySelector('#delay'), '::after').content")
    b.until("__console.state().robots[0].phase === 'pause'")
    b.js("window.__late = 0")
    b.until("document.querySelector('#link').className !== 'held'")
    b.js("__mend()")
    assert len(seen) == 3


def test_interventions_are_counted_by_intervention(b):
    before = b.js("__console.state().account.interventions")
    take(b)
    drive(b)
    b.key(" ")
    b.until("__console.state().robots[0].paused === 'ann' && __console.state().robots[0].phase === 'pause'")
    b.key(" ")
    b.until("!__console.state().robots[0].paused")
    drive(b, "s")
    b.key("r")
    b.until("__console.state().robots[0].phase === 'recovery'")
    b.until(f"__console.state().account.interventions === {before + 1}")
    b.key("c")
    drive(b, "a")
    assert b.js("__console.state().account.interventions") == before + 1
    b.key("y")
    b.until(
        "document.querySelector('#message').innerText.includes('the episode is over (ann marked it a "
        "success)')"
    )
    b.until("__console.state().account.kept >= 1 && __console.held()[1] === 0")


def test_the_page_has_no_secret_no_foreign_source_and_no_inline_script(b):
    assert (
        b.js("location.search + location.hash + document.cookie") == "" and b.js("location.pathname") == "/"
    )
    assert b.js(
        "performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin) || "
        "e.name.startsWith('blob:'))"
    )
    b.js(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.__inline = 1'; "
        "document.body.append(s); const i = document.createElement('img'); i.setAttribute('onerror', "
        "'window.__inline = 2'); i.src = 'x:'; document.body.append(i); i.remove(); })()"
    )
    time.sleep(0.2)
    assert b.js("window.__inline === undefined")


def test_every_control_has_a_name_and_news_are_announced(b):
    nodes = b.call("Accessibility.getFullAXTree")["nodes"]
    named = [
        (n["role"]["value"], n.get("name", {}).get("value", ""))
        for n in nodes
        if not n.get("ignored") and "role" in n
    ]
    assert all(
        name for role, name in named if role in ("button", "slider", "image", "navigation", "complementary")
    )
    assert {"button", "slider", "status", "alert", "navigation", "complementary", "table"} <= {
        role for role, _ in named
    }
    assert sum(name.startswith("Robot ") for role, name in named if role == "button") == 3


@pytest.mark.parametrize("theme", ["", "dark"])
def test_text_can_be_read(b, theme):
    b.js(f"document.documentElement.className = {theme!r}")
    try:
        for held in (False, True):
            if held:
                take(b)
            assert b.js(CONTRAST) == []
        b.js("window.dispatchEvent(new Event('blur'))")
        b.until("!document.querySelector('#inactive').hidden")
        assert b.js(CONTRAST) == []
    finally:
        b.js("window.dispatchEvent(new Event('focus')); document.documentElement.className = ''")


def test_a_lost_connection_is_said_and_mended(b):
    take(b)
    b.js(
        "window.__bar = ''; new MutationObserver(() => { __bar += document.querySelector('#hold').innerText; "
        "}).observe(document.querySelector('#hold'), {childList: true, subtree: true, characterData: true}); "
        "__console.ws().close()"
    )
    b.until("__bar.includes('No connection') && __bar.includes('Robot 0 stands still')")
    b.until(
        "__console.ws().readyState === 1 && document.querySelector('#holds').innerText.startsWith('You hold "
        "nothing')"
    )
    assert "yours from another page" in text(b, "#does") or b.js("__console.state().robots[0].holder") == ""
    b.key("Enter")
    b.until("__console.held()[1] > 0")
