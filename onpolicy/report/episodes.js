let data = JSON.parse(document.getElementById("data").textContent);
const MEASURES = ["probability", "advantage", "weight"];
const LIMITS = [["from reward", "reward", -1], ["to reward", "reward", 1],
  ["from tokens", "num_tokens", -1], ["to tokens", "num_tokens", 1]];
const COLUMNS = [["episode", "", (episode) => episode.place], ["reward", "number"],
  ["tokens", "number", (episode) => episode.num_tokens],
  ["turns", "number", (episode) => episode.num_turns],
  ["trajectories", "number", (episode) => episode.trajectories.length],
  ["faults", "", (episode) => episode.faults.length], ["text", "", (episode) => gist(episode)]];
const SECONDS_BETWEEN_LOOKS = 3;
const STAND_IN = "\ufffc"; // in the text of a turn with images, one for each
const ROWS_AT_ONCE = 100; // the list draws more as it is scrolled
// What chat templates write before a message, with its role.
const ROLE = new RegExp([
  /<\|im_start\|>(\w+)\n?/, /<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*/,
  /<start_of_turn>(\w+)\n?/, /<\|start\|>([\w.]+)/,
  /<[|｜](system|user|assistant|tool|observation|User|Assistant)[|｜]>\n?/,
  /\[(SYSTEM_PROMPT|INST|\/INST|TOOL_RESULTS)\]/,
].map((each) => each.source).join("|"), "g");
const NAMES = { "/INST": "assistant", INST: "user", SYSTEM_PROMPT: "system", TOOL_RESULTS: "tool",
  ipython: "tool", observation: "tool", model: "assistant", User: "user", Assistant: "assistant" };
// What models and templates write around calls of tools, their results, thoughts and code; and at a
// message's end, which has no box.
const BOXES = [
  ["thoughts", /<think>[^]*?(?:<\/think>|$)/], ["tools", /<tools>[^]*?(?:<\/tools>|$)/],
  ["call", /<(?:tool_call|function_calls)>[^]*?(?:<\/(?:tool_call|function_calls)>|$)/],
  ["call", /<｜tool▁calls▁begin｜>[^]*?(?:<｜tool▁calls▁end｜>|$)/],
  ["call", /\[TOOL_CALLS\][^\n]*|<\|python_tag\|>[^<]*|(?<=^|\n)\[[A-Za-z_][\w.]*\([^\n]*\)\]/],
  ["result", /<tool_response>[^]*?(?:<\/tool_response>|$)/],
  ["result", /<｜tool▁outputs▁begin｜>[^]*?(?:<｜tool▁outputs▁end｜>|$)/],
  ["code", /```[^]*?(?:```|$)/],
  ["", /<\|(?:im_end|eot_id|eom_id|end|call|return)\|>\n?|<end_of_turn>\n?|<｜end▁of▁sentence｜>|<\/s>/],
];
const BOX = new RegExp(BOXES.map(([, each]) => `(${each.source})`).join("|"), "g");
let chosen = [null, null]; // the keys of the episode that is shown, and of the one beside it
let measure = MEASURES[0];
let order = { column: 0, sign: 1 };
let undrawn = []; // episodes at the end of the list that have no row yet

// ---- which episodes are listed

function addFilters() {
  const filters = document.getElementById("filters");
  const search = make("input", { type: "search", "data-name": "text", placeholder: "in all messages" });
  filters.append(labelled("text", search));
  search.oninput = () => drawList();
  for (const [title, name, side] of LIMITS) {
    const input = make("input", { type: "number", step: "any", "data-name": name, "data-side": side });
    filters.append(labelled(title, input));
    input.oninput = () => drawList();
  }
  for (const [title, name] of [["rollout", "where"], ["fault", "faults"]]) {
    const select = make("select", { "data-name": name });
    filters.append(labelled(title, select));
    select.onchange = () => drawList();
  }
}

function labelled(title, control) {
  return make("label", {}, `${title} `, control);
}

/** Offers what the episodes have now, and leaves the choice as it is. */
function fillChoices() {
  for (const select of document.querySelectorAll("#filters select")) {
    const { value } = select, name = select.dataset.name;
    const found = [...new Set(data.episodes.flatMap((episode) => episode[name]))];
    const choices = [["", "all"], ...(name === "faults" ? [["any", "any"], ["none", "none"]] : [])];
    for (const each of found) choices.push([`= ${each}`, each]);
    select.replaceChildren(...choices.map(([key, text]) => make("option", { value: key }, text)));
    select.value = choices.some(([key]) => key === value) ? value : "";
  }
}

/** What is searched for, in any case of its letters; null for nothing. */
function sought() {
  const { value } = document.querySelector('[data-name="text"]');
  return value ? new RegExp(value.replace(/[\^$.*+?()[\]{}|\\/]/g, "\\$&"), "iu") : null;
}

function whole(episode) {
  return episode.whole ??= [episode.key, ...episode.facts.flat(),
    ...episode.trajectories.flatMap((each) => each.turns.map((turn) => turn.text))].join("\n");
}

function isListed(episode) {
  const within = [...document.querySelectorAll("#filters input[data-side]")].every((input) => {
    const side = Number(input.dataset.side), value = episode[input.dataset.name];
    return input.value === "" || (value !== null && side * (Number(input.value) - value) >= 0);
  });
  const words = sought();
  return within && (!words || words.test(whole(episode)))
    && [...document.querySelectorAll("#filters select")].every((select) => {
      const known = [episode[select.dataset.name]].flat();
      if (select.value === "any" || select.value === "none") {
        return (known.length > 0) === (select.value === "any");
      }
      return select.value === "" || known.includes(select.value.slice(2));
    });
}

/** In the chosen order; what has no value comes last. */
function listed() {
  const value = COLUMNS[order.column][2] ?? ((episode) => episode.reward);
  return data.episodes.filter(isListed).map((episode) => [value(episode), episode])
    .sort(([a], [b]) => (a === null) - (b === null) || order.sign * ((a > b) - (a < b)))
    .map(([, episode]) => episode);
}

function drawList(count = ROWS_AT_ONCE) {
  const table = document.getElementById("episodes"), { scrollTop } = table.parentElement;
  data.episodes.forEach((episode, place) => { episode.place = place; });
  const found = listed();
  undrawn = [...found];
  table.replaceChildren();
  addTable(table, COLUMNS.map(([title, kind], i) => [sorter(title, kind, i), kind]), []);
  drawMore(count);
  table.parentElement.scrollTop = scrollTop;
  const of = `${found.length} of ${data.episodes.length} episodes`;
  const more = data.left_out ? `; ${data.left_out} earlier rollouts are not here (--rollouts)` : "";
  document.getElementById("about").textContent = `${data.run}: ${of}${more}`;
  markFound();
}

function drawMore(count = ROWS_AT_ONCE) {
  document.getElementById("episodes").append(...undrawn.splice(0, count).map(listRow));
}

function sorter(title, kind, i) {
  const arrow = i === order.column ? (order.sign > 0 ? " ▲" : " ▼") : "";
  const button = make("button", { "data-column": title }, title + arrow);
  button.onclick = () => {
    const first = kind === "number" || title === "faults" ? -1 : 1;
    order = { column: i, sign: i === order.column ? -order.sign : first };
    drawList();
  };
  return button;
}

/** A line of text: what is sought, or the last question and the answer to it. */
function gist(episode) {
  const words = sought(), line = (text) => text.replace(/\s+/g, " ").trim();
  if (words) {
    const at = whole(episode).search(words);
    return `…${line(whole(episode).slice(Math.max(0, at - 30), at + 160))}`;
  }
  return episode.gist ??= messages(episode.trajectories[0].turns)
    .filter(({ role, text }) => role !== "system" && text.trim())
    .map(({ turn, text }) => line(turn.images ? text.replaceAll(STAND_IN, "[image]") : text).slice(0, 90))
    .slice(0, 3).join(" → ");
}

function listRow(episode) {
  const numbers = [episode.reward, episode.num_tokens, episode.num_turns, episode.trajectories.length];
  const line = make("tr", { "data-episode": episode.key, tabindex: 0 }, make("td", {}, episode.key),
    ...numbers.map((value) => make("td", { class: "number" }, format(value))),
    make("td", {}, episode.faults.join(", ")), make("td", { class: "gist" }, gist(episode)));
  line.classList.toggle("chosen", chosen.includes(episode.key));
  line.onclick = ({ shiftKey }) => {
    if (shiftKey && chosen[0]) choose(chosen[0], episode.key); else choose(episode.key, null);
  };
  line.onkeydown = (event) => {
    if (event.key === "Enter") line.onclick(event);
    const next = { ArrowDown: line.nextSibling, ArrowUp: line.previousSibling }[event.key];
    if (next?.dataset.episode) next.focus();
  };
  return line;
}

// ---- what a link keeps: the episodes that are shown, in the fragment

function fragment(keys) {
  const [episode, beside] = keys;
  return `#${new URLSearchParams({ episode, ...(beside ? { beside } : {}) })}`;
}

function choose(...keys) {
  if (location.hash !== fragment(keys)) history.pushState(null, "", fragment(keys));
  followLink();
}

function followLink() {
  const said = new URLSearchParams(location.hash.slice(1));
  chosen = [said.get("episode"), said.get("beside")];
  for (const line of document.querySelectorAll("tr[data-episode]")) {
    line.classList.toggle("chosen", chosen.includes(line.dataset.episode));
  }
  drawShown();
  if (chosen[0]) document.getElementById("shown").scrollIntoView();
}

// ---- one episode, and another beside it

function drawShown() {
  const place = document.getElementById("shown"), keys = chosen.filter(Boolean);
  place.hidden = keys.length === 0;
  const buttons = MEASURES.map((name) => {
    const button = make("button", { class: "log", "aria-pressed": String(name === measure) }, name);
    button.onclick = () => {
      measure = name;
      drawShown();
    };
    return button;
  });
  const columns = keys.map((key, i) => {
    const episode = data.episodes.find((each) => each.key === key);
    const said = `${key}: no such episode is on this page. It has those of the last rollouts (--rollouts).`;
    return make("section", { class: "episode" }, ...(episode ? drawEpisode(episode, i) : [said]));
  });
  place.replaceChildren(make("p", {}, "tokens coloured by ", ...buttons),
    make("div", { class: "columns" }, ...columns));
  markFound();
}

function drawEpisode(episode, column) {
  const facts = make("table");
  addTable(facts, [["what", ""], ["value", ""]], episode.facts.map(factRow));
  const title = make("h2", {}, make("a", { href: fragment([episode.key]) }, episode.key));
  return [title, column ? closer() : besides(episode), facts,
    ...episode.trajectories.flatMap((each, number) => drawTrajectory(episode, each, number))];
}

function closer() {
  const button = make("button", { class: "run" }, "close");
  button.onclick = () => choose(chosen[0], null);
  return button;
}

/** Offers the other episodes of the same prompt. */
function besides(episode) {
  const others = data.episodes.filter((each) => each.prompt === episode.prompt && each !== episode);
  const options = others.map(({ key, reward }) => (
    make("option", { value: key }, `${key}, reward ${format(reward)}`)));
  const select = make("select", { id: "beside" }, make("option", { value: "" }, "none"), ...options);
  select.value = others.some(({ key }) => key === chosen[1]) ? chosen[1] : "";
  select.onchange = () => choose(episode.key, select.value || null);
  return labelled("beside, of the same prompt:", select);
}

function factRow([name, value]) {
  return make("tr", {}, make("td", {}, name), make("td", { class: "fact" }, value));
}

function drawTrajectory(episode, trajectory, number) {
  const several = episode.trajectories.length > 1;
  const compared = trajectory.mismatched === null ? "not compared" : `${trajectory.mismatched} mismatched`;
  const reward = trajectory.reward === null ? "could not be scored" : `reward ${format(trajectory.reward)}`;
  const told = episode.has_failed ? "failed" : `${reward}, ended by ${trajectory.finish_reason}, ${compared}`;
  const title = several ? `trajectory ${number}: ${told}` : told;
  const largest = Math.max(1e-9, ...trajectory.turns.flatMap((turn) => (
    [turn.advantages ?? 0].flat().map(Math.abs))));
  return [make("h2", {}, title),
    ...messages(trajectory.turns).flatMap((message) => drawMessage(message, largest))];
}

/** The messages of turns: where a template begins one, and where given and sampled text meet. */
function messages(turns) {
  let role = null;
  return turns.flatMap((turn) => {
    const parts = turn.texts ?? [turn.text], text = parts.join("");
    const begins = [...text.matchAll(ROLE)].map((found) => (
      { from: found.index, mark: found[0], name: found.slice(1).find(Boolean) }));
    if (begins[0]?.from !== 0) begins.unshift({ from: 0, mark: "", name: null });
    return begins.map(({ from, mark, name }, i) => {
      role = name === null ? role : NAMES[name] ?? name;
      const start = from + mark.length, end = begins[i + 1]?.from ?? text.length;
      const first = i === 0 ? { branch: turn.branch } : {};
      return { turn, role, mark, from, start, end, text: text.slice(start, end), ...first,
        isLast: i === begins.length - 1 };
    });
  });
}

function drawMessage(message, largest) {
  const { turn, role, branch } = message, isMono = role === "tool" || hasGrid(message.text);
  const facts = turn.texts && message.isLast ? [`${turn.texts.length} tokens`] : [];
  if (turn.reward !== undefined && message.isLast) facts.push(`reward ${format(turn.reward)}`);
  if (turn.seconds !== undefined && message.isLast) facts.push(`${format(turn.seconds)} s`);
  const who = [role, turn.sampled ? "sampled" : "given"].filter(Boolean).join(", ");
  const kind = `turn ${turn.sampled ? "sampled" : "given"}${isMono ? " mono" : ""}`;
  const head = make("h3", { class: "role" }, who, ...facts.map((fact) => make("span", {}, fact)));
  const isBare = !turn.sampled && !message.text.trim(); // what comes before an answer
  const inside = isBare ? [make("span", { class: "mark" }, JSON.stringify(message.mark + message.text))]
    : drawText(message, largest);
  return [...(branch ? [make("div", { class: "branch" }, branch)] : []), ...(isBare ? [] : [head]),
    make("div", { class: kind }, ...inside)];
}

/** Whether three lines one after another are of the same length, as those of a board are. */
function hasGrid(text) {
  const sizes = text.replace(/\x1b\[[\d;]*m/g, "").split("\n").map((line) => line.trimEnd().length);
  return sizes.some((size, i) => size > 2 && size === sizes[i + 1] && size === sizes[i + 2]);
}

/** A message's text in pieces: its mark, tokens, and boxes around calls, results, thoughts and code. */
function drawText({ turn, from, start, end, text }, largest) {
  const pieces = [{ from, to: start, mark: true }];
  let at = 0;
  for (const found of text.matchAll(BOX)) {
    const kind = BOXES[found.slice(1).findIndex((each) => each !== undefined)][0];
    pieces.push({ from: start + at, to: start + found.index });
    at = found.index + found[0].length;
    pieces.push({ from: start + found.index, to: start + at, kind });
  }
  pieces.push({ from: start + at, to: end });
  return pieces.filter((piece) => piece.to > piece.from).map((piece) => {
    const inside = drawSpan(turn, piece, largest);
    if (piece.mark || piece.kind === "") return make("span", { class: "mark" }, ...inside);
    return piece.kind ? make("div", { class: "box", "data-kind": piece.kind }, ...inside)
      : make("span", {}, ...inside);
  });
}

/** A stretch of a turn's text: of sampled text the tokens that begin in it. */
function drawSpan(turn, { from, to }, largest) {
  if (turn.images) return drawImages(turn, from, to);
  if (!turn.texts) return colourCodes(turn.text.slice(from, to));
  let at = 0;
  return turn.texts.flatMap((text, i) => {
    const begin = at;
    at += text.length;
    return begin >= from && begin < to ? [drawToken(turn, text, i, largest)] : [];
  });
}

/** Given text with its images, each in the place of its stand-in. */
function drawImages({ text, images }, from, to) {
  const first = text.slice(0, from).split(STAND_IN).length - 1;
  return text.slice(from, to).split(STAND_IN).flatMap((part, i) => (
    [...(i ? [drawImage(...images[first + i - 1])] : []), ...colourCodes(part)]));
}

/** An image, which a click shows whole; of another format in words. */
function drawImage(number, name) {
  const { told, url } = data.images[name], text = `image ${number}, ${told}`;
  if (!url) return make("span", { class: "mark" }, `[${text}]`);
  const button = make("button", { class: "image", title: text, "aria-pressed": "false" },
    make("img", { src: url, alt: text, decoding: "async" }));
  button.onclick = () => { button.ariaPressed = String(button.ariaPressed !== "true"); };
  return button;
}

/** Text that a terminal would colour is marked, and its codes are in the title. */
function colourCodes(text) {
  let code = "";
  return text.split(/(\x1b\[[\d;]*m)/).flatMap((part, i) => {
    if (i % 2) code = /^\x1b\[0*m$/.test(part) ? "" : part.slice(1);
    if (i % 2 || !part) return [];
    return [code ? make("span", { class: "ansi", title: `terminal code ${code}` }, part) : part];
  });
}

function at(column, i) { return Array.isArray(column) ? column[i] : column ?? null; }

function drawToken(turn, text, i, largest) {
  const logProb = at(turn.log_probs, i), advantage = at(turn.advantages, i), weight = at(turn.weights, i);
  const probability = logProb === null ? null : Math.exp(logProb);
  const title = `probability ${format(probability)}, log-probability ${format(logProb)}, `
    + `advantage ${format(advantage)}, weight ${format(weight)}`;
  const style = shade({ probability, advantage, weight }[measure], largest);
  return make("span", { class: weight === 0 ? "token rejected" : "token", style, title }, text);
}

/** Blue: unlikely, or above what is usual; red: below it; no colour: a sure token, 0, or a weight of 1. */
function shade(value, largest) {
  if (value === null) return "";
  const size = { probability: 1 - value, advantage: value / largest,
    weight: Math.max(-1, Math.min(1, Math.log2(value))) }[measure];
  const share = Math.round(70 * Math.abs(size));
  return `background: color-mix(in srgb, var(--c${size < 0 ? 6 : 0}) ${share}%, transparent)`;
}

/** Marks what is sought in the messages that are shown, over the borders of tokens too. */
function markFound() {
  const words = sought(), ranges = [];
  if (!CSS.highlights) return;
  for (const place of words ? document.querySelectorAll("#shown .turn") : []) {
    const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT), nodes = [];
    let text = "";
    while (walker.nextNode()) {
      nodes.push([text.length, walker.currentNode]);
      text += walker.currentNode.data;
    }
    const spot = (at) => {
      const [from, node] = nodes.findLast(([begin]) => begin <= at);
      return [node, at - from];
    };
    for (const { index, 0: found } of text.matchAll(new RegExp(words, "giu"))) {
      const range = new Range(), [last, at] = spot(index + found.length - 1);
      range.setStart(...spot(index));
      range.setEnd(last, at + 1);
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

// ---- a run that goes on

async function look() {
  try {
    const answer = await fetch("data.json", { headers: { "If-None-Match": data.version } });
    if (answer.status === 304) return;
    const found = await answer.json();
    if (found.version !== data.version) {
      data = found;
      fillChoices();
      drawList(document.getElementById("episodes").rows.length);
      drawShown();
    }
  } catch {
    document.getElementById("about").textContent = "onpolicy episodes has ended: this is as it was";
  }
}

document.getElementById("list").onscroll = ({ target: { scrollTop, scrollHeight, clientHeight } }) => {
  if (scrollTop + 3 * clientHeight > scrollHeight) drawMore();
};
addFilters();
fillChoices();
drawList();
followLink();
window.addEventListener("hashchange", followLink);
if (location.protocol.startsWith("http")) setInterval(look, 1000 * SECONDS_BETWEEN_LOOKS);
