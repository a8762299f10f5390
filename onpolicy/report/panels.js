const DASHES = ["", "6 4", "2 3", "9 3 2 3", "1 5", "12 4"];
const HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 12, BOTTOM = 24;
const STRIPE = 7; // pixels of a colour where curves of several groups lie on each other
const MOST_NAMES = 8;
const MOST_DOTS = 25; // values of a curve that are marked one by one
let dragged = null; // where a drag over a panel began

// ---- what a panel shows

/** Where a step of a run, or of a group's median, lies on the chosen axis; NaN if nothing tells. */
function placer(owner) {
  if (view.axis === "rollouts") return (step) => step;
  const [steps, places] = owner.places[view.axis] || [[], []];
  const known = new Map(steps.map((step, i) => [step, number(places[i])]));
  return (step) => known.get(step) ?? NaN;
}

/** The mean over the last rollouts; of equal values it is the same to the last bit. */
function smooth(steps, values) {
  let first = 0;
  return values.map((value, i) => {
    while (steps[first] <= steps[i] - view.smoothing) first += 1;
    const last = values.slice(first, i + 1).filter(Number.isFinite);
    return value + last.reduce((sum, each) => sum + (each - value), 0) / last.length;
  });
}

function visibleCurves(panel) {
  const several = panel.metrics.length > 1;
  const runPlace = data.runs.map(placer), groupPlace = data.groups.map(placer);
  return panel.metrics.flatMap((metric, m) => {
    const suffix = several ? ` · ${metric.name}` : "";
    const curve = (points, place, more) => {
      const raw = points[1].map(number), values = view.smoothing > 1 ? smooth(points[0], raw) : raw;
      return { dash: DASHES[m % DASHES.length], metric: metric.name, points, steps: points[0], raw,
        values, places: points[0].map(place), ...more, label: more.label + suffix };
    };
    const runs = Object.entries(metric.runs).map(([key, points]) => {
      const run = Number(key), group = groupOf[run], alone = data.groups[group].runs.length === 1;
      return curve(points, runPlace[run], { run, group, kind: alone ? "one" : "thin",
        label: alone ? data.groups[group].name : runLabel(run) });
    }).filter(({ run }) => !hidden.has(run));
    const medians = Object.entries(metric.medians).map(([key, points]) => (
      curve(points, groupPlace[key], { group: Number(key), kind: "median", label: data.groups[key].name })
    )).filter(({ group }) => data.groups[group].runs.some((run) => !hidden.has(run)));
    return [...runs, ...medians];
  }).sort((a, b) => (a.kind === "median") - (b.kind === "median"));
}

function visibleMoves() {
  return data.runs.flatMap((run, i) => {
    const place = placer(run);
    return hidden.has(i) ? [] : run.moves.map((move) => (
      { ...move, run: i, group: groupOf[i], place: place(move.step) }));
  });
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

function wholeRange(panels) {
  const places = panels.flatMap((panel) => panel.curves.flatMap((c) => [c.places[0], c.places.at(-1)]));
  const [low, high] = bounds([...places, ...visibleMoves().map((move) => move.place)]) || [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function valueScale(curves, log, range) {
  const all = curves.flatMap((curve) => curve.raw.filter((_, i) => (
    curve.places[i] >= range[0] && curve.places[i] <= range[1])));
  const use = log ? (v) => (v > 0 ? Math.log10(v) : NaN) : (v) => v;
  let [low, high] = bounds(all.map(use)) || [0, 1];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
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
function pieces({ places, values }, x, y) {
  const found = [];
  let last = null, isAlone = false;
  places.forEach((place, i) => {
    const across = x(place), at = y(values[i]);
    const spot = Number.isFinite(across + at) ? `${across.toFixed(1)},${at.toFixed(1)}` : null;
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
  const drawn = curves.map((curve) => pieces(curve, x, y));
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
      if (key || from === to || curve.kind === "raw" || curve.places.length > MOST_DOTS) continue;
      for (const spot of [from, to]) {
        const [cx, cy] = spot.split(","), style = `--color: ${color(curve.group)}`;
        svg.append(make("circle", { class: "dot", style, cx, cy, r: 2.4 }));
      }
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
  for (const place of ticks(...range, Math.max(3, Math.floor(width / 90)))) {
    if (view.axis !== "seconds" && !Number.isInteger(place)) continue;
    const at = { x: x(place), y: HEIGHT - 7, "text-anchor": "middle" };
    svg.append(make("text", at, format(place)));
  }
}

function drawMove(svg, move, x) {
  const at = x(move.place), style = `--color: ${color(move.group)}`;
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
  const { svg, curves } = panel, width = svg.clientWidth || 400;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const inside = width - LEFT - RIGHT - 6, share = inside / (range[1] - range[0]);
  const x = (place) => LEFT + (place - range[0]) * share;
  const scale = valueScale(curves, logarithmic.has(panel.title), range);
  const moves = visibleMoves().filter(({ place }) => place >= range[0] && place <= range[1]);
  drawAxes(svg, scale, x, width, range);
  const cut = { x: LEFT - 4, width: inside + 10, height: HEIGHT };
  const plot = make("svg", { ...cut, viewBox: `${cut.x} 0 ${cut.width} ${HEIGHT}` });
  svg.append(plot);
  moves.forEach((move) => drawMove(plot, move, x));
  if (view.smoothing > 1) {
    drawCurves(plot, curves.map((each) => ({ ...each, values: each.raw, kind: "raw" })), x, scale.y);
  }
  drawCurves(plot, curves, x, scale.y);
  showIdentical(panel, curves);
  svg.append(make("rect", { class: "band", y: TOP, height: HEIGHT - TOP - BOTTOM }),
    make("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM }));
  panel.log.setAttribute("aria-pressed", String(scale.log));
  panel.drawn = { x, moves, place: (at) => range[0] + (at - LEFT) / share };
}

function drawAll() {
  markHidden();
  showChoices();
  const panels = data.panels.filter(isChosen);
  data.panels.forEach((panel) => { panel.box.hidden = !panels.includes(panel); });
  panels.forEach((panel) => { panel.curves = visibleCurves(panel); });
  const range = view.zoom || wholeRange(panels);
  panels.forEach((panel) => draw(panel, range));
}

// ---- pointing at a panel

/** The nearest value of each curve, and the nearest of all. */
function nearest(panel, position) {
  const found = panel.curves.map((curve) => {
    const far = curve.places.map((place) => Math.abs(panel.drawn.x(place) - position));
    const i = far.reduce((best, each, j) => (each < (far[best] ?? Infinity) ? j : best), -1);
    return { ...curve, i, far: far[i], step: curve.steps[i], place: curve.places[i] };
  }).filter((curve) => curve.i >= 0);
  return { found, best: found.reduce((a, b) => (a && a.far <= b.far ? a : b), null) };
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

/** Curves with a value at the rollout; on the other axes, at about the place. */
function valuesAt(panel, { found, best }) {
  const isThere = (curve) => (view.axis === "rollouts" ? curve.step === best.step
    : Math.abs(panel.drawn.x(curve.place) - panel.drawn.x(best.place)) < 12);
  const rank = (curve) => [curve.group, curve.kind === "thin" ? 1 : 0];
  return found.filter(isThere)
    .sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
}

function point(panel, event) {
  const position = event.clientX - panel.svg.getBoundingClientRect().left;
  const around = nearest(panel, position), { best } = around;
  if (best === null) return;
  const rows = valuesAt(panel, around);
  const moves = panel.drawn.moves.filter((move) => (
    move.place === best.place || Math.abs(panel.drawn.x(move.place) - position) < 6));
  const where = view.axis === "rollouts" ? "" : ` · ${format(Math.round(best.place))} ${view.axis}`;
  tip.replaceChildren(make("div", { class: "bold" }, `rollout ${format(best.step)}${where}`));
  const most = Math.max(8, Math.floor(innerHeight / 20) - 4 - 2 * moves.length);
  rows.slice(0, most).forEach((curve) => {
    const label = curve.kind === "median" ? `${curve.label} (median)` : curve.label;
    const raw = format(curve.points[1][curve.i]);
    const value = view.smoothing > 1 ? `${format(curve.values[curve.i])} (${raw})` : raw;
    tip.append(tipRow(curve.group, label, value, curve.kind !== "thin"));
  });
  if (rows.length > most) tip.append(make("div", {}, `and ${rows.length - most} more`));
  moves.forEach((move) => tip.append(tipMove(move)));
  placeTip(event);
  showCross(best.place);
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

function showCross(place) {
  for (const panel of data.panels.filter(isChosen)) {
    const cross = panel.svg.querySelector(".cross"), at = panel.drawn.x(place);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    cross.style.visibility = "visible";
  }
}

function stopPointing() {
  tip.style.display = "none";
  document.querySelectorAll(".cross").forEach((cross) => { cross.style.visibility = "hidden"; });
}

/** A drag across a panel zooms into its part of the axis, in all panels; a double click leaves it. */
function listenToDrags(panel) {
  const { svg } = panel, at = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.onpointerdown = (event) => {
    point(panel, event);
    if (event.button === 0) dragged = at(event);
    svg.setPointerCapture(event.pointerId);
  };
  svg.onpointermove = (event) => {
    point(panel, event);
    if (dragged === null) return;
    const band = svg.querySelector(".band");
    band.setAttribute("x", Math.min(dragged, at(event)));
    band.setAttribute("width", Math.abs(dragged - at(event)));
  };
  svg.onpointerup = (event) => {
    const ends = [dragged, at(event)].sort((a, b) => a - b)
      .map((place) => Number(panel.drawn.place(place).toPrecision(6))); // short in a link
    const far = dragged !== null && Math.abs(dragged - at(event)) > 5;
    dragged = null;
    if (far) view.zoom = ends;
    if (far) drawAll();
  };
  svg.onpointercancel = () => { dragged = null; };
  svg.onpointerleave = stopPointing;
  svg.ondblclick = control("whole").onclick;
}
