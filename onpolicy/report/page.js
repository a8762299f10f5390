const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set(); // positions of runs
const logarithmic = new Set(); // titles of panels
const groupOf = data.runs.map((_, run) => data.groups.findIndex((g) => g.runs.includes(run)));
const DASHES = ["", "6 4", "2 3", "9 3 2 3", "1 5", "12 4"];
const HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 12, BOTTOM = 24;
const STRIPE = 7; // pixels of a colour where curves of several groups lie on each other
const MOST_NAMES = 8;
const tip = document.getElementById("tip");

// ---- colours

function color(group) {
  return group < 8 ? `var(--c${group})` : `hsl(${(group * 137.5) % 360} 65% 52%)`;
}

function swatch(group) {
  return make("span", { class: "swatch", style: `--color: ${color(group)}` });
}

// ---- tables and legend

function nameCell(run) {
  const { name, episodes } = data.runs[run], group = data.groups[groupOf[run]].name;
  return make("td", { class: "name" }, swatch(groupOf[run]), name,
    ...(group === name ? [] : [make("small", {}, group)]), ...sameAs(run),
    ...(episodes ? [" ", make("a", { href: episodes }, "episodes")] : []));
}

/** Says which earlier run logged the same values; nothing if none did. */
function sameAs(run) {
  const first = data.runs[run].same_as;
  if (first === null) return [];
  const title = "The same values in every metric but times and speeds";
  return [make("small", { class: "same", title }, ` same as ${data.runs[first].name}`)];
}

function row(run, cells) {
  return make("tr", { "data-run": run }, nameCell(run), ...cells);
}

function fillSummary() {
  const titles = [["run", ""], ["rollouts", "number"], ["first reward", "number"],
    ["last reward", "number"], ["tokens compared", "number"], ["tokens mismatched", "number"],
    ["governor moves", "number"]];
  const reward = (value) => (typeof value === "number" ? value.toFixed(3) : format(value));
  const rows = data.groups.flatMap((group) => group.runs).map((i) => {
    const run = data.runs[i];
    const numbers = [run.rollouts, reward(run.first_reward), reward(run.last_reward),
      run.compared, run.mismatched, run.moves.length];
    return row(i, numbers.map((value) => make("td", { class: "number" }, format(value))));
  });
  addTable(document.getElementById("summary"), titles, rows);
}

function fillMoves() {
  const rows = data.runs.flatMap((run, i) => run.moves.map((move) => row(i, [
    make("td", { class: "number" }, format(move.step)),
    make("td", {}, `${move.source} → ${move.target}`), make("td", { class: "reason" }, move.reason),
  ])));
  document.getElementById("governor").hidden = rows.length === 0;
  const titles = [["run", ""], ["rollout", "number"], ["move", ""], ["reason", ""]];
  addTable(document.getElementById("moves"), titles, rows);
}

function runLabel(run) {
  const seeds = data.groups[groupOf[run]].runs.map((i) => data.runs[i].seed);
  const telling = seeds.every((seed) => seed !== null) && new Set(seeds).size === seeds.length;
  return telling ? `seed ${data.runs[run].seed}` : data.runs[run].name;
}

function fillLegend() {
  data.groups.forEach((group, g) => {
    const several = group.runs.length > 1;
    const title = `${group.name}: bold is the median of ${group.runs.length} runs`;
    const whole = toggle("group", group.runs, several ? { title } : {}, swatch(g), group.name,
      ...(several ? [] : sameAs(group.runs[0])));
    const each = several ? group.runs.map((run) => (
      toggle("run", [run], { title: data.runs[run].name }, runLabel(run), ...sameAs(run)))) : [];
    document.getElementById("legend").append(make("div", { class: "entry" }, whole, ...each));
  });
}

function toggle(kind, runs, attributes, ...children) {
  const known = { class: kind, "data-runs": runs.join(" "), ...attributes };
  const button = make("button", known, ...children);
  button.onclick = () => {
    const hide = runs.some((run) => !hidden.has(run));
    runs.forEach((run) => (hide ? hidden.add(run) : hidden.delete(run)));
    drawAll();
  };
  return button;
}

function markHidden() {
  document.querySelectorAll("button[data-runs]").forEach((button) => {
    const off = button.dataset.runs.split(" ").every((run) => hidden.has(Number(run)));
    button.classList.toggle("off", off);
    button.setAttribute("aria-pressed", String(!off));
  });
  document.querySelectorAll("tr[data-run]").forEach((line) => {
    line.classList.toggle("off", hidden.has(Number(line.dataset.run)));
  });
}

// ---- what a panel shows

function visibleCurves(panel) {
  const several = panel.metrics.length > 1;
  return panel.metrics.flatMap((metric, m) => {
    const suffix = several ? ` · ${metric.name}` : "";
    const common = { dash: DASHES[m % DASHES.length], metric: metric.name };
    const runs = Object.entries(metric.runs).map(([run, points]) => {
      const group = groupOf[run];
      const alone = data.groups[group].runs.length === 1;
      return { ...common, run: Number(run), group, points, kind: alone ? "one" : "thin",
        label: (alone ? data.groups[group].name : `${runLabel(run)}`) + suffix };
    }).filter((curve) => !hidden.has(curve.run));
    const medians = Object.entries(metric.medians).map(([group, points]) => (
      { ...common, group: Number(group), points, kind: "median",
        label: data.groups[group].name + suffix }
    )).filter((curve) => data.groups[curve.group].runs.some((run) => !hidden.has(run)));
    return [...runs, ...medians];
  }).sort((a, b) => (a.kind === "median") - (b.kind === "median"));
}

function visibleMoves() {
  return data.runs.flatMap((run, i) => (hidden.has(i) ? [] : run.moves.map((move) => (
    { ...move, run: i, group: groupOf[i] }))));
}

function number(value) { return typeof value === "string" ? NaN : value; }

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

function stepBounds(panels) {
  const steps = panels.flatMap((panel) => visibleCurves(panel).flatMap((c) => (
    [c.points[0][0], c.points[0].at(-1)])));
  const [low, high] = bounds([...steps, ...visibleMoves().map((move) => move.step)]) || [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function valueScale(curves, log) {
  const all = curves.flatMap((curve) => curve.points[1].map(number));
  const use = log ? (v) => (v > 0 ? Math.log10(v) : NaN) : (v) => v;
  let [low, high] = bounds(all.map(use)) || [0, 1];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  const floor = !log && low >= 0 && low - margin < 0 ? 0 : low - margin;
  high += margin;
  const height = HEIGHT - TOP - BOTTOM;
  return { low: floor, high, log, y: (v) => TOP + height * (1 - (use(v) - floor) / (high - floor)) };
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) {
    found.push(Number((i * size).toPrecision(12)));
  }
  return found;
}

function valueTicks(scale) {
  if (!scale.log) return ticks(scale.low, scale.high, 5);
  const powers = ticks(scale.low, scale.high, 4).filter(Number.isInteger).map((p) => 10 ** p);
  if (powers.length > 1) return powers;
  return ticks(10 ** scale.low, 10 ** scale.high, 4).filter((v) => v > 0);
}

// ---- drawing

/** Pieces between two spots; not finite values break a line, steps without a value do not. */
function pieces([steps, values], x, y) {
  const found = [];
  let last = null, isAlone = false;
  steps.forEach((step, i) => {
    const at = y(number(values[i]));
    const spot = Number.isFinite(at) ? `${x(step).toFixed(1)},${at.toFixed(1)}` : null;
    if (spot === null && isAlone) found.push([last, last]);
    if (spot !== null && last !== null) found.push([last, spot]);
    isAlone = spot !== null && last === null;
    last = spot;
  });
  if (isAlone) found.push([last, last]);
  return found;
}

/** Where curves of several groups lie on each other, they take turns; see `drawCurve`. */
function drawCurves(svg, curves, x, y) {
  const drawn = curves.map((curve) => pieces(curve.points, x, y));
  const owners = new Map();
  drawn.forEach((found, i) => found.forEach(([from, to]) => {
    const key = `${from} ${to}`;
    owners.set(key, [...(owners.get(key) || []), i]);
  }));
  curves.forEach((curve, i) => {
    const paths = new Map([["", { groups: [curve.group], text: "" }]]);
    let previous = null;
    for (const [from, to] of drawn[i]) {
      const all = owners.get(`${from} ${to}`);
      const groups = [...new Set(all.map((owner) => curves[owner].group))];
      const key = groups.length > 1 && from !== to ? all.join() : "";
      if (!paths.has(key)) paths.set(key, { groups, text: "" });
      const goesOn = previous && previous.key === key && previous.to === from;
      const start = goesOn ? "" : `M${from}`;
      paths.get(key).text += start + (from === to ? dot(groups.indexOf(curve.group)) : `L${to}`);
      previous = { key, to };
    }
    paths.forEach(({ groups, text }) => { if (text) drawCurve(svg, curve, text, groups); });
  });
}

/** A lone value; those of several groups stand side by side. */
function dot(place) {
  return `m${(4 * place - 1.2).toFixed(1)},0h2.4`;
}

function drawAxes(svg, scale, x, width, range) {
  for (const value of valueTicks(scale)) {
    const y = scale.y(value);
    svg.append(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    svg.append(make("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, format(value)));
  }
  for (const step of ticks(...range, Math.max(3, Math.floor(width / 90)))) {
    if (!Number.isInteger(step)) continue;
    const at = { x: x(step), y: HEIGHT - 7, "text-anchor": "middle" };
    svg.append(make("text", at, format(step)));
  }
}

function drawMove(svg, move, x) {
  const at = x(move.step), style = `--color: ${color(move.group)}`;
  const label = `${move.source} → ${move.target}: ${move.reason}`;
  const place = { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM };
  const names = { "data-run": move.run, "data-step": move.step, "aria-label": label };
  svg.append(make("line", { class: "move", style, ...place, ...names }));
  svg.append(make("path", { class: "flag", style, d: `M${at - 5},${TOP - 8}h10l-5,8z` }));
}

/** Among several groups a curve leaves gaps, of which each of the others fills one. */
function drawCurve(svg, curve, text, groups) {
  const shared = groups.length > 1;
  const dash = shared ? `${STRIPE} ${STRIPE * (groups.length - 1)}` : curve.dash;
  svg.append(make("path", {
    class: `curve ${curve.kind}${shared ? " shared" : ""}`, style: `--color: ${color(curve.group)}`,
    "stroke-dasharray": dash, "stroke-dashoffset": -STRIPE * groups.indexOf(curve.group),
    "data-metric": curve.metric, "data-run": curve.run ?? "", "data-group": curve.group, d: text,
  }));
}

/** Names the curves of a panel that are the same from the first to the last rollout. */
function showIdentical(panel, curves) {
  const alike = new Map();
  for (const curve of curves.filter((one) => one.kind !== "median")) {
    const key = JSON.stringify(curve.points);
    alike.set(key, [...(alike.get(key) || []), curve]);
  }
  const several = panel.metrics.length > 1;
  const name = (curve) => data.runs[curve.run].name + (several ? ` · ${curve.metric}` : "");
  const sets = [...alike.values()].filter((set) => set.length > 1).map((set) => set.map(name));
  panel.identical.replaceChildren(...sets.map((names) => {
    const more = names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} more` : "";
    const text = `identical: ${names.slice(0, MOST_NAMES).join(", ")}${more}`;
    return make("div", { title: names.join(", ") }, text);
  }));
}

function draw(panel, range) {
  const svg = panel.svg, width = svg.clientWidth || 400;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const x = (step) => (
    LEFT + (width - LEFT - RIGHT - 6) * (step - range[0]) / (range[1] - range[0]));
  const curves = visibleCurves(panel);
  const scale = valueScale(curves, logarithmic.has(panel.title));
  const moves = visibleMoves();
  drawAxes(svg, scale, x, width, range);
  moves.forEach((move) => drawMove(svg, move, x));
  drawCurves(svg, curves, x, scale.y);
  showIdentical(panel, curves);
  svg.append(make("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM }));
  panel.drawn = { x, curves, moves };
}

function drawAll() {
  markHidden();
  const range = stepBounds(data.panels);
  data.panels.forEach((panel) => draw(panel, range));
}

// ---- pointing at a panel

function nearestStep(panel, position) {
  let best = null;
  for (const curve of panel.drawn.curves) for (const step of curve.points[0]) {
    const distance = Math.abs(panel.drawn.x(step) - position);
    if (best === null || distance < best.distance) best = { step, distance };
  }
  return best && best.step;
}

function tipRow(group, label, value, bold) {
  const weight = bold ? "bold" : "";
  return make("div", {}, swatch(group), make("span", { class: `label ${weight}` }, label),
    make("span", { class: `value ${weight}` }, value));
}

function tipMove(move) {
  const text = `rollout ${move.step}: ${move.source} → ${move.target}. ${move.reason}`;
  return make("div", { class: "reason" }, swatch(move.group), make("span", { class: "label" }, text));
}

function valuesAt(panel, step) {
  const found = panel.drawn.curves.flatMap((curve) => {
    const i = curve.points[0].indexOf(step);
    return i < 0 ? [] : [{ ...curve, value: curve.points[1][i] }];
  });
  const rank = (curve) => [curve.group, curve.kind === "thin" ? 1 : 0];
  return found.sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
}

function point(panel, event) {
  const position = event.clientX - panel.svg.getBoundingClientRect().left;
  const step = nearestStep(panel, position);
  if (step === null) return;
  const rows = valuesAt(panel, step);
  const moves = panel.drawn.moves.filter((move) => (
    move.step === step || Math.abs(panel.drawn.x(move.step) - position) < 6));
  tip.replaceChildren(make("div", { class: "bold" }, `rollout ${format(step)}`));
  const most = Math.max(8, Math.floor(innerHeight / 20) - 4 - 2 * moves.length);
  rows.slice(0, most).forEach((curve) => {
    const median = curve.kind === "median";
    const label = median ? `${curve.label} (median)` : curve.label;
    tip.append(tipRow(curve.group, label, format(curve.value), curve.kind !== "thin"));
  });
  if (rows.length > most) tip.append(make("div", {}, `and ${rows.length - most} more`));
  moves.forEach((move) => tip.append(tipMove(move)));
  placeTip(event);
  showCross(step);
}

function placeTip(event) {
  tip.style.display = "block";
  const { offsetWidth: width, offsetHeight: height } = tip;
  const right = event.clientX + 16 + width < innerWidth;
  const left = right ? event.clientX + 16 : Math.max(6, event.clientX - 16 - width);
  const top = Math.min(event.clientY + 14, innerHeight - height - 6);
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(6, top)}px`;
}

function showCross(step) {
  for (const panel of data.panels) {
    const cross = panel.svg.querySelector(".cross"), at = panel.drawn.x(step);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    cross.style.visibility = "visible";
  }
}

function stopPointing() {
  tip.style.display = "none";
  document.querySelectorAll(".cross").forEach((cross) => { cross.style.visibility = "hidden"; });
}

// ---- building the page

function metricNames(panel) {
  return make("div", { class: "names" }, ...panel.metrics.map((metric, m) => {
    const path = make("path", { d: "M0,3h22", "stroke-dasharray": DASHES[m % DASHES.length] });
    const line = panel.metrics.length > 1 ? [make("svg", { viewBox: "0 0 22 6" }, path)] : [];
    return make("span", { title: metric.meaning || metric.name }, ...line, metric.name);
  }));
}

function logButton(panel) {
  const button = make("button", { class: "log", "aria-pressed": "false" }, "log");
  button.title = "Logarithmic values; zero and negative ones are left out";
  button.onclick = () => {
    const on = !logarithmic.has(panel.title);
    if (on) logarithmic.add(panel.title); else logarithmic.delete(panel.title);
    button.setAttribute("aria-pressed", String(on));
    draw(panel, stepBounds(data.panels));
  };
  return button;
}

function addPanel(panel) {
  const head = make("div", { class: "head" }, make("h2", {}, panel.title), logButton(panel));
  panel.svg = make("svg", { class: "plot", role: "img", "aria-label": panel.title });
  panel.svg.onpointermove = panel.svg.onpointerdown = (event) => point(panel, event);
  panel.svg.onpointerleave = stopPointing;
  panel.identical = make("div", { class: "identical" });
  const box = { class: "panel", "data-panel": panel.title };
  const parts = [head, metricNames(panel), panel.svg, panel.identical];
  document.getElementById("panels").append(make("section", box, ...parts));
}

function about() {
  const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
  const runs = count(data.runs.length, "run");
  if (!data.panels.length) return `${runs}. Nothing has been logged yet.`;
  const grouped = data.runs.length === data.groups.length ? "" : (
    ` in ${count(data.groups.length, "group")}. The runs of a group differ only in their seed; its `
    + "median is bold");
  return `${runs}${grouped}. Horizontal axes: rollouts.`;
}

document.getElementById("about").textContent = about();
fillSummary();
fillLegend();
fillMoves();
data.panels.forEach(addPanel);
drawAll();
window.addEventListener("resize", drawAll);
