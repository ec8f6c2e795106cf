"use strict";
// The console's page. `at` is the robot that is selected: it is shown large, its card has the focus, keys act on it. `held`
// is the robot that this page holds, -1 for none; while it holds one, that one stays selected.

const $ = id => document.getElementById(id);
const PAIRS = [["w", "s"], ["a", "d"], ["q", "e"], ["ArrowRight", "ArrowLeft"], ["ArrowUp", "ArrowDown"], ["z", "x"], ["u", "j"],
  ["i", "k"], ["o", "l"]];  // of the axes in turn: plus, minus
const SIGNS = {ArrowRight: "→", ArrowLeft: "←", ArrowUp: "↑", ArrowDown: "↓"};
const SHORT = {Enter: "take", " ": "pause", b: "rewind", r: "recovery", c: "correction", y: "good", n: "bad", Delete: "discard", Backspace: "discard"};
const REACH = .12;  // m of an axis that is drawn
const TOLD = 20000;  // ms that a refusal stays in view

let ws, state = null, stateAt = 0, tries = 0, over = "";
let at = 0, held = -1, number = 0, episode = -1, ending = null, phase = "correction", grip = 1, gripAt = 0;
let active = document.hasFocus(), blind = false, pictures = 0, perSecond = 0, roundTrip = 0, asked = 0, digits = "", digitsTimer;
const cards = [], cameras = {}, keys = new Set(), mouse = {x: 0, y: 0, z: 0, from: null};

// ------------------------------------------------------------ what is said

function say(text, bad = false) {
  $(bad ? "alert" : "message").textContent = text;
  $(bad ? "message" : "alert").textContent = "";
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { $("alert").textContent = $("message").textContent = ""; }, bad ? TOLD : 8000);
}

function send(message) { if (ws && ws.readyState === 1) ws.send(JSON.stringify(message)); }

// ------------------------------------------------------------ the connection

function connect() {
  ws = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws`);
  ws.binaryType = "arraybuffer";
  ws.onopen = () => { tries = 0; asked = 0; over = ""; send({t: "look", robot: at}); };
  ws.onmessage = e => typeof e.data === "string" ? hear(JSON.parse(e.data)) : show(e.data);
  ws.onclose = lost;
}

async function lost(e) {
  const had = held;
  held = -1; number = 0;
  const still = had >= 0 ? ` Robot ${had} stands still.` : "";
  const ended = "This session has ended: open the new address that robo_rl console prints.";
  if (e.code === 4001) over = "This console is open in another tab. Reload the page to use this one.";
  else if (e.code === 4003) over = ended;
  else {
    over = `No connection, trying again …${still}`;
    if (tries > 1 && await fetch("/").then(r => r.status === 403, () => false)) over = ended;
    else setTimeout(connect, Math.min(4000, 250 * 2 ** tries++));
  }
  draw();
}

function hear(m) {
  if (m.t === "pong") { roundTrip = performance.now() - m.sent; asked = 0; }
  else if (m.t === "hold") {
    held = m.robot; number = m.number; at = m.robot; grip = m.grip;
    drive();
    say(`You hold robot ${m.robot}. It stands still until you move it.`);
    draw();
  } else if (m.t === "error" && m.of === "drive") {  // the next state tells why
    if (held < 0 || m.number !== number) return;
    ending = {robot: held, text: m.text};
    held = -1; number = 0;
  } else if (m.t === "error") say(m.text, true);
  else if (m.t === "said") say(m.text);
  else if (m.t === "state") {
    const first = !state;
    stateAt = performance.now();
    if (held >= 0 && m.robots[held].number === number) {
      episode = m.robots[held].episode;
      if (performance.now() - gripAt > 500) grip = m.robots[held].grip || grip;  // a device may have turned it
    }
    else if (held >= 0 && state.robots[held].number === number) {
      ending = {robot: held, text: "somebody else has it"};
      held = -1; number = 0;
    }
    if (ending) {
      const r = m.robots[ending.robot], finished = r.episode !== episode;
      if (finished) say(`Robot ${ending.robot}: the episode is over (${r.last}). You hold nothing now.`);
      else say(`Robot ${ending.robot} is not yours any more: ${ending.text}.`, true);
      ending = null;
    }
    state = m;
    if (first) build();
    draw();
  }
}

function show(data) {
  const length = new DataView(data).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  let from = 4 + length;
  for (const p of head.pictures) {
    const url = URL.createObjectURL(new Blob([new Uint8Array(data, from, p.bytes)], {type: "image/jpeg"})), card = cards[p.robot];
    from += p.bytes;
    if (card && (!p.large || p.view === state.views[0])) { put(card.img, url); card.count += 1; }
    if (p.robot === at && p.large && cameras[p.view]) {
      put(cameras[p.view].img, url, true);
      axes(cameras[p.view], p.axes);
    } else if (!card) URL.revokeObjectURL(url);
  }
  if (head.pictures.length) pictures += 1;
  send({t: "seen", frame: head.frame});
}

function put(img, url, large = false) {
  const before = img.dataset.url;
  img.dataset.url = img.src = url;
  if (large) img.onload = () => img.parentNode.style.setProperty("--ratio", img.naturalWidth / img.naturalHeight);
  if (before && before !== url) setTimeout(() => URL.revokeObjectURL(before), 1000);
}

// ------------------------------------------------------------ the axes on a picture

function axes(camera, lines) {
  camera.axes = lines;
  if (!lines || lines[0].some(x => x < -.2 || x > 1.2)) { camera.svg.replaceChildren(); return; }
  const [origin, ...along] = lines, parts = [], places = [];
  along.forEach((d, k) => {
    const size = Math.hypot(...d) * REACH, scale = size ? Math.min(.21, Math.max(.1, size)) / size * REACH : 0;
    for (const sign of [-1, 1]) {
      const end = d.map((x, j) => origin[j] + sign * (sign > 0 ? 1 : .75) * scale * x);
      const color = "xyz"[k], [x1, y1, x2, y2] = [...origin, ...end].map(x => 1000 * x);
      if (sign > 0) parts.push(element("line", {x1, y1, x2, y2, class: "under"}));
      parts.push(element("line", {x1, y1, x2, y2, class: color + (sign > 0 ? "" : " back")}));
      if (sign > 0) parts.push(arrow(x1, y1, x2, y2, color));
      const far = [x2 + (x2 - x1) * .16, y2 + (y2 - y1) * .16].map((x, j) => Math.min(j ? 960 : 915, Math.max(j ? 30 : 85, x)));
      while (places.some(p => Math.abs(p[0] - far[0]) < 140 && Math.abs(p[1] - far[1]) < 30)) far[1] += y2 < 500 ? 31 : -31;
      places.push(far);
      const text = element("text", {x: far[0], y: far[1] + 9}), key = element("tspan", {class: "key"});
      key.textContent = PAIRS[k][sign > 0 ? 0 : 1].toUpperCase();
      text.append(key, ` ${state.axes[k].words[sign > 0 ? 1 : 0]}`);
      parts.push(text);
    }
  });
  camera.svg.replaceChildren(...parts);
}

function arrow(x1, y1, x2, y2, color) {
  const a = Math.atan2(y2 - y1, x2 - x1), corner = (r, b) => `${x2 + r * Math.cos(a + b)},${y2 + r * Math.sin(a + b)}`;
  return element("polygon", {points: `${corner(22, 0)} ${corner(17, 2.2)} ${corner(17, -2.2)}`, class: color});
}

function element(name, attributes) {
  const out = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [k, v] of Object.entries(attributes)) out.setAttribute(k, v);
  return out;
}

// ------------------------------------------------------------ drawing the state

function build() {
  state.robots.forEach((_, i) => {
    const card = document.createElement("button");
    card.className = "robot";
    card.innerHTML = '<img alt=""><span class="text"><span class="row"><b></b><span class="pill"></span></span>' +
      '<span class="small"></span></span>';
    card.querySelector("b").textContent = `Robot ${i}`;
    card.onfocus = () => select(i);
    card.onclick = () => { select(i); focusSelected(); };
    card.ondblclick = () => { if (held < 0) act("take"); };
    $("robots").append(card);
    cards[i] = {card, img: card.querySelector("img"), pill: card.querySelector(".pill"), more: card.querySelector(".small"), count: 0};
  });
  for (const view of state.views) {
    const figure = document.createElement("figure"), frame = document.createElement("div"), img = document.createElement("img");
    const caption = document.createElement("figcaption"), svg = element("svg", {viewBox: "0 0 1000 1000", "aria-hidden": "true"});
    frame.className = "frame"; img.draggable = false; caption.textContent = view;
    frame.append(img, svg, caption); figure.append(frame); $("views").append(figure);
    cameras[view] = {img, svg, frame, axes: null};
    steer(cameras[view]);
  }
  let k = 0;
  const cell = (key, word) => `<td>${word}</td><td>${key ? `<kbd data-key="${key}">${SIGNS[key] || key.toUpperCase()}</kbd>` : "–"}</td>`;
  $("keys").tBodies[0].innerHTML = state.axes.map(a => {
    if (a.drive === "grip") return `<tr>${cell("g", `${a.words.join(" or ")}`)}<td colspan="2">${a.name}</td></tr>`;
    const [plus, minus] = PAIRS[k++] || ["", ""];
    return `<tr>${cell(plus, a.words[1])}${cell(minus, a.words[0])}</tr>`;
  }).join("");
  $("digits").textContent = `Digits choose a robot by its number (0 to ${state.robots.length - 1}).`;
  focusSelected();
}

function word(r) { return r.why && r.phase !== "recovery" && r.phase !== "correction" ? "needs help" : r.phase; }
function kind(r) { return word(r) === "needs help" ? "help" : r.phase; }
function seconds(s) { return s < 1 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(1)} s`; }

function draw() {
  if (!state) { if (over) { $("holds").textContent = "Not connected"; say(over, true); } return; }
  state.robots.forEach((r, i) => {
    const c = cards[i], whose = r.holder === state.you ? "you hold it" : r.holder ? `${r.holder} holds it` : "";
    c.card.className = "robot" + (i === at ? " on" : "") + (r.why ? " needs" : "");
    c.card.tabIndex = held >= 0 && i !== held ? -1 : 0;
    c.card.setAttribute("aria-current", i === at);
    c.pill.className = `pill ${kind(r)}`; c.pill.textContent = word(r);
    c.more.textContent = r.why ? `${r.why}, ${Math.round(r.waiting)} s ago` : whose || (r.paused ? `paused by ${r.paused}` : "") ||
      (r.successes + r.failures ? `${r.successes} of ${r.successes + r.failures} succeeded` : r.task);
    c.card.setAttribute("aria-label", `Robot ${i}, ${word(r)}, ${c.more.textContent}`);
  });
  const r = state.robots[at], mine = held === at && number > 0;
  $("title").textContent = `Robot ${at}`;
  $("phase").className = `pill ${kind(r)}`; $("phase").textContent = `${word(r)}, ${r.time.toFixed(1)} s`;
  $("task").textContent = r.why ? `Needs help: ${r.why}. Task: ${r.task}` : `Task: ${r.task || "–"}${state.limit ? ` (usually ${state.limit.toFixed(0)} s)` : ""}`;
  $("stage").setAttribute("aria-label", `cameras of robot ${at}`);
  for (const [view, c] of Object.entries(cameras)) c.img.alt = `robot ${at}, camera ${view}`;
  label("take", mine ? "Hand back" : r.holder && r.holder !== state.you ? `Held by ${r.holder}` : "Take over", mine ? "Esc" : "Enter");
  label("pause", r.paused || (r.why && !mine) ? "Go on" : "Pause", "Space");
  for (const id of ["rewind", "recovery", "correction"]) $(id).setAttribute("aria-disabled", !mine);
  for (const id of ["recovery", "correction"]) $(id).setAttribute("aria-pressed", mine && phase === id);
  drawHold(r, mine);
  drawCalls();
  drawLink();
  drawInactive();
  const a = state.account, total = a.episodes;
  $("who").textContent = state.you;
  $("success").textContent = total ? `${a.successes} of ${total} (${Math.round(100 * a.successes / total)} %)` : "–";
  $("interventions").textContent = `${a.interventions} (${a.per_hour} per hour)`;
  $("minutes").textContent = `${a.operator_minutes}, ${a.reaction || "–"} s`;
  $("human").textContent = `${a.human} %`;
  $("kept").textContent = a.unsaved ? `${a.kept} (${a.unsaved} not saved yet)` : a.kept;
}

function label(id, text, key) {
  $(id).firstElementChild.textContent = text;
  $(id).lastElementChild.textContent = key;
}

function drawHold(r, mine) {
  let what = "You hold nothing", does = `Robot ${at} is selected. Enter takes it over.`, color = "none";
  if (over) [what, does, color] = ["Not connected", over, "bad"];
  else if (mine && (r.late || blind)) [what, does, color] = [`You hold robot ${at}: held still`, "The picture is too old to drive by.", "bad"];
  else if (mine) {
    what = `You hold robot ${at}`; color = r.phase === "policy" ? "pause" : r.phase;
    does = !active ? "Keyboard not active: it stands still." : r.paused ? `Paused by ${r.paused}: Space goes on.` : r.phase === "pause" ? "It stands still. Esc hands back."
      : `You drive: recorded as ${r.phase}. Esc hands back.`;
  } else if (r.holder === state.you) does = `Robot ${at} is yours from another page: Enter takes it again.`;
  else if (r.holder) does = `Robot ${at} is selected. ${r.holder} holds it.`;
  else if (r.why) does = `Robot ${at} needs help: ${r.why}. Enter takes it over.`;
  const before = $("holds").textContent + $("does").textContent;
  if (before !== what + does) { $("holds").textContent = what; $("does").textContent = does; }
  $("hold").className = color;
  $("stage").className = mine ? "held" + (r.late || blind || over ? " late" : "") : over ? "late" : "";
}

function drawCalls() {
  const needs = state.robots.map((r, i) => r.why && i !== held ? i : -1).filter(i => i >= 0);
  const text = [state.trouble, needs.length ? `Help needed: robot ${needs.join(", ")} (H)` : ""].filter(x => x).join(". ");
  if ($("calls").textContent !== text) $("calls").textContent = text;
  document.title = (held >= 0 ? `Robot ${held} held – ` : needs.length ? `(${needs.length}) ` : "") + "robo_rl console";
}

function delayNow() {
  const now = performance.now(), age = state ? state.delay + (now - stateAt) / 1000 : 0;
  return {age, trip: Math.max(roundTrip, asked ? now - asked : 0) / 1000};
}

function drawLink() {
  const {age, trip} = delayNow(), worst = Math.max(age, trip), most = state.max_delay;
  $("link").className = worst > most ? "held" : worst > Math.max(.4, .6 * most) ? "bad" : worst > Math.max(.15, .25 * most) ? "warn" : "ok";
  $("delay").textContent = seconds(worst);
  $("detail").textContent = `round trip ${seconds(trip)}, ${perSecond} pictures/s`;
}

function drawInactive() {
  const slider = document.activeElement === $("speed");
  $("inactive").hidden = active && !slider;
  $("inactive").textContent = !active ? "Keyboard not active: click here"
    : "Arrow keys set the speed now. Press Esc or click here to drive again";
}

// ------------------------------------------------------------ acting

function focusSelected() { if (cards[at]) cards[at].card.focus({preventScroll: true}); }

function select(i) {
  if (i === at || !state.robots[i]) return;
  if (held >= 0) { say(`You hold robot ${held}: hand it back (Esc) before you look at another.`, true); return; }
  at = i;
  for (const c of Object.values(cameras)) { c.svg.replaceChildren(); put(c.img, cards[i].img.src); }
  send({t: "look", robot: at});
  draw();
}

function act(id) {
  const r = state && state.robots[at], mine = held === at && number > 0;
  if (!r) return;
  if (["rewind", "recovery", "correction"].includes(id) && !mine) { say(`Take robot ${at} over first (Enter).`, true); return; }
  if (id === "take" && mine) { send({t: "back", robot: held, number}); held = -1; number = 0; draw(); }
  else if (id === "take") { phase = "correction"; send({t: "take", robot: at}); }
  else if (id === "pause") send({t: "pause", robot: at, on: !(r.paused || (r.why && !mine))});
  else if (id === "rewind") send({t: "rewind", robot: at, number, seconds: 1});
  else if (id === "good" || id === "bad") send({t: "mark", robot: at, episode: r.episode, success: id === "good"});
  else if (id === "discard") send({t: "mark", robot: at, episode: r.episode, success: null});
  else { phase = id; draw(); }
}

function digit(k) {  // robots above 9 have two digits
  clearTimeout(digitsTimer);
  digits = state.robots[+(digits + k)] && digits !== "0" ? digits + k : k;
  digitsTimer = setTimeout(() => { digits = ""; }, 800);
  if (!state.robots[+digits]) say(`There is no robot ${digits}: they are 0 to ${state.robots.length - 1}.`, true);
  else { select(+digits); focusSelected(); }
}

function nextCall() {
  const n = state.robots.length;
  for (let k = 1; k <= n; k++) if (state.robots[(at + k) % n].why) { select((at + k) % n); focusSelected(); return; }
  say("No robot needs help.");
}

function setSpeed(value) {
  $("speed").value = value;
  $("percent").textContent = `${$("speed").value} %`;
}

// ------------------------------------------------------------ keys, mouse, gamepad

const name = e => e.key.length === 1 ? e.key.toLowerCase() : e.key;

function turnGrip() { grip = -grip; gripAt = performance.now(); }

function lightKeys() { for (const k of document.querySelectorAll("[data-key]")) k.classList.toggle("down", keys.has(k.dataset.key)); }

addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey || !state) return;
  const k = name(e), control = e.target.closest ? e.target.closest("button:not(.robot), input") : null;
  if (k === "Tab") return;
  if (k === "Escape") {
    e.preventDefault();
    if (held >= 0 && control !== $("speed")) { at = held; act("take"); }
    else if (held >= 0) act("take");
    focusSelected(); draw();
    return;
  }
  if (control === $("speed") && /^(Arrow|Home|End|Page)/.test(k)) return;
  if (control && control !== $("speed") && (k === "Enter" || k === " ")) return;
  if (k.startsWith("Arrow") || k === " " || k === "Enter") e.preventDefault();
  if (!e.repeat) {
    if (SHORT[k]) { act(SHORT[k]); if (control) focusSelected(); }
    if (k === "g") turnGrip();
    if (k === "h") nextCall();
    if (/^[0-9]$/.test(k)) digit(k);
  }
  if (k === "-" || k === "+" || k === "=") setSpeed(+$("speed").value + (k === "-" ? -5 : 5));
  keys.add(k);
  lightKeys();
});
addEventListener("keyup", e => { keys.delete(name(e)); lightKeys(); });

$("keys").addEventListener("pointerdown", e => {  // a key of the table is held as one of the keyboard is: on a phone there is none
  const k = e.target.dataset && e.target.dataset.key;
  if (!k) return;
  e.preventDefault();
  e.target.setPointerCapture(e.pointerId);
  if (k === "g") turnGrip();
  keys.add(k);
  lightKeys();
});
$("keys").addEventListener("lostpointercapture", e => { keys.delete(e.target.dataset.key); lightKeys(); });

function setActive(on) {
  active = on;
  if (!on) { keys.clear(); mouse.x = mouse.y = mouse.z = 0; lightKeys(); }
  else focusSelected();
  if (state) draw();
}
addEventListener("blur", () => setActive(false));
addEventListener("focus", () => setActive(true));
document.addEventListener("visibilitychange", () => setActive(!document.hidden && document.hasFocus()));
document.addEventListener("focusin", () => state && drawInactive());
document.addEventListener("focusout", () => setTimeout(() => {  // a click on nothing, a control that went away
  if (active && document.activeElement === document.body) focusSelected();
}));
for (const id of ["take", "pause", "rewind", "recovery", "correction", "good", "bad", "discard"])
  $(id).onclick = e => { act(id); if (e.detail) focusSelected(); };
$("speed").oninput = () => setSpeed($("speed").value);
for (const kind of ["pointerup", "change"]) $("speed").addEventListener(kind, e => { if (e.type === "pointerup") setTimeout(focusSelected); });
$("inactive").onclick = () => setActive(true);
$("theme").onclick = e => { document.documentElement.classList.toggle("dark"); if (e.detail) focusSelected(); };

function steer(camera) {
  const frame = camera.frame, stop = () => { mouse.from = null; mouse.x = mouse.y = 0; };
  frame.onpointerdown = e => { frame.setPointerCapture(e.pointerId); mouse.from = [e.clientX, e.clientY]; };
  frame.onpointermove = e => {
    if (!mouse.from) return;
    const d = [e.clientX - mouse.from[0], e.clientY - mouse.from[1]].map(x => x / frame.clientWidth), a = camera.axes;
    const det = a ? a[1][0] * a[2][1] - a[1][1] * a[2][0] : 0;
    if (Math.abs(det) > .02) {  // the hand follows the pointer: d = x a1 + y a2
      mouse.x = (d[0] * a[2][1] - d[1] * a[2][0]) / det / .08;
      mouse.y = (d[1] * a[1][0] - d[0] * a[1][1]) / det / .08;
    } else { mouse.x = -d[1] * 5; mouse.y = -d[0] * 5; }
  };
  frame.onpointerup = frame.onpointercancel = stop;
  frame.onwheel = e => {
    mouse.z = -Math.sign(e.deltaY);
    e.preventDefault();
    clearTimeout(mouse.timer);
    mouse.timer = setTimeout(() => { mouse.z = 0; }, 120);
  };
}

const pad = {grip: false, back: false};
function gamepad() {
  const found = [...(navigator.getGamepads ? navigator.getGamepads() : [])].find(p => p);
  if (!found) return [];
  const [a, b] = [0, 1].map(j => !!(found.buttons[j] && found.buttons[j].pressed));
  if (a && !pad.grip) turnGrip();
  if (b && !pad.back && held >= 0) act("take");
  [pad.grip, pad.back] = [a, b];
  return [1, 0, 3, 2].map(j => Math.abs(found.axes[j] || 0) > .1 ? -found.axes[j] : 0);
}

function drive() {
  if (held < 0 || !number || !state) return;
  const stick = gamepad(), drag = [mouse.x, mouse.y, mouse.z], speed = $("speed").value / 100;
  if (held < 0) return;  // the gamepad handed back
  let k = 0;
  const action = state.axes.map(a => {
    if (a.drive === "grip") return grip;
    const [plus, minus] = PAIRS[k] || ["", ""];
    const v = keys.has(plus) - keys.has(minus) + (drag[k] || 0) + (stick[k] || 0);
    k += 1;
    return Math.max(-1, Math.min(1, v)) * speed;
  });
  const {age, trip} = delayNow();
  blind = Math.max(age, trip) > state.max_delay;
  send({t: "drive", robot: held, number, action, phase: blind || !(active || stick.length) ? "pause" : phase});
}

setInterval(drive, 25);
setInterval(() => { if (!asked) asked = performance.now(); send({t: "ping", sent: performance.now()}); }, 500);
setInterval(() => { if (state) drawLink(); }, 200);
setInterval(() => { perSecond = pictures; pictures = 0; }, 1000);
document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
window.__console = {state: () => state, held: () => [held, number], at: () => at, counts: () => cards.map(c => c.count), ws: () => ws};
connect();
