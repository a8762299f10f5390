const data = JSON.parse(document.getElementById("data").textContent);
const view = { axis: "rollouts", smoothing: 1, panels: "", zoom: null }; // what is chosen
const hidden = new Set(); // positions of runs
const logarithmic = new Set(); // titles of panels
const AXES = { rollouts: "rollouts", tokens: "tokens of prompts and responses trained on before",
  seconds: "seconds of the steps before" };
const groupOf = data.runs.map((_, run) => data.groups.findIndex((g) => g.runs.includes(run)));
let unknown = []; // what the link asks for and this page does not have
const tip = document.getElementById("tip");
const control = (name) => document.getElementById(name);

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
    ...(episodes ? [" ", make("a", { href: episodes }, "episodes")] : []),
    ...(group === name ? [] : [make("small", {}, group)]), ...sameAs(run));
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

function fillDifferences() {
  const rows = data.differences.map(([flag, values]) => make("tr", {}, make("td", {}, flag),
    ...values.map((value) => make("td", {}, format(value)))));
  control("flags").hidden = rows.length === 0;
  const titles = data.groups.map((group, g) => make("span", {}, swatch(g), group.name));
  addTable(control("differences"), [["flag", ""], ...titles.map((title) => [title, ""])], rows);
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

// ---- what a link keeps: the choices, in the fragment

function fragment() {
  const said = new URLSearchParams(), { axis, smoothing, panels, zoom } = view;
  if (axis !== "rollouts") said.set("axis", axis);
  if (smoothing > 1) said.set("smoothing", smoothing);
  if (panels) said.set("panels", panels);
  if (zoom) said.set("zoom", zoom.join(" "));
  for (const run of hidden) said.append("hide", data.runs[run].name);
  for (const title of logarithmic) said.append("log", title);
  return said.toString();
}

function followLink() {
  const said = new URLSearchParams(location.hash.slice(1));
  const zoom = (said.get("zoom") || "").split(" ").map(Number);
  const smoothing = Number(said.get("smoothing"));
  Object.assign(view, { panels: said.get("panels") || "",
    axis: Object.hasOwn(AXES, said.get("axis")) ? said.get("axis") : "rollouts",
    smoothing: smoothing >= 1 && smoothing <= 100 ? Math.round(smoothing) : 1,
    zoom: zoom.length === 2 && zoom[0] < zoom[1] && zoom.every(Number.isFinite) ? zoom : null });
  hidden.clear();
  logarithmic.clear();
  data.runs.forEach((run, i) => { if (said.getAll("hide").includes(run.name)) hidden.add(i); });
  data.panels.forEach(({ title }) => { if (said.getAll("log").includes(title)) logarithmic.add(title); });
  const kept = new URLSearchParams(fragment());
  unknown = [...said].filter(([name, value]) => !kept.getAll(name).includes(value));
  drawAll();
}

function listenToControls() {
  for (const name of ["axis", "smoothing", "panels"]) {
    control(`choose-${name}`).oninput = ({ target }) => {
      view[name] = name === "smoothing" ? Number(target.value) : target.value;
      if (name === "axis") view.zoom = null;
      drawAll();
    };
  }
  for (const option of control("choose-axis").options) {
    option.disabled = option.value !== "rollouts" && !data.runs.some((run) => run.places[option.value]);
  }
  control("whole").onclick = () => {
    view.zoom = null;
    drawAll();
  };
}

function showChoices() {
  control("choose-axis").value = view.axis;
  control("choose-smoothing").value = view.smoothing;
  control("window").value = view.smoothing === 1 ? "off" : `${view.smoothing} rollouts`;
  if (control("choose-panels").value !== view.panels) control("choose-panels").value = view.panels;
  control("whole").hidden = !view.zoom;
  control("about").textContent = about();
  if (fragment() !== location.hash.slice(1)) history.replaceState(null, "", `#${fragment()}`);
}

function isChosen({ title, metrics }) {
  const text = [title, ...metrics.map((metric) => metric.name)].join(" ").toLowerCase();
  const words = view.panels.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
  return !words.length || words.some((word) => text.includes(word));
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
    drawAll();
  };
  return button;
}

function addPanel(panel) {
  panel.log = logButton(panel);
  const head = make("div", { class: "head" }, make("h2", {}, panel.title), panel.log);
  panel.svg = make("svg", { class: "plot", role: "img", "aria-label": panel.title });
  listenToDrags(panel);
  panel.identical = make("div", { class: "identical" });
  const parts = [head, metricNames(panel), panel.svg, panel.identical];
  panel.box = make("section", { class: "panel", "data-panel": panel.title }, ...parts);
  control("panels").append(panel.box);
}

function about() {
  const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
  const runs = count(data.runs.length, "run");
  if (!data.panels.length) return `${runs}. Nothing has been logged yet.`;
  const grouped = data.runs.length === data.groups.length ? "" : (
    ` in ${count(data.groups.length, "group")}. The runs of a group differ only in their seed; its `
    + "median is bold");
  const missing = data.runs.filter((run) => view.axis !== "rollouts" && !run.places[view.axis]);
  const without = missing.length ? `; ${missing.map((run) => run.name).join(", ")} logged none` : "";
  const lost = unknown.map(([name, value]) => ` The link's ${name}=${value} means nothing here.`).join("");
  return `${runs}${grouped}. Horizontal axes: ${AXES[view.axis]}${without}.${lost}`;
}

fillSummary();
fillDifferences();
fillLegend();
fillMoves();
listenToControls();
data.panels.forEach(addPanel);
followLink();
window.addEventListener("resize", drawAll);
window.addEventListener("hashchange", followLink);
