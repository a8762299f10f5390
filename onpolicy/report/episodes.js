let data = JSON.parse(document.getElementById("data").textContent);
const MEASURES = ["probability", "advantage", "weight"];
const LIMITS = [["from reward", "reward", -1], ["to reward", "reward", 1],
  ["from tokens", "num_tokens", -1], ["to tokens", "num_tokens", 1]];
const SECONDS_BETWEEN_LOOKS = 3;
let chosen = null; // the key of the episode that is shown
let measure = MEASURES[0];

// ---- which episodes are listed

function addFilters() {
  const filters = document.getElementById("filters");
  for (const [title, name, side] of LIMITS) {
    const input = make("input", { type: "number", step: "any", "data-name": name, "data-side": side });
    filters.append(labelled(title, input));
    input.oninput = drawList;
  }
  for (const [title, name] of [["rollout", "where"], ["fault", "faults"]]) {
    const select = make("select", { "data-name": name });
    filters.append(labelled(title, select));
    select.onchange = drawList;
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

function isListed(episode) {
  const within = [...document.querySelectorAll("#filters input")].every((input) => {
    const side = Number(input.dataset.side), value = episode[input.dataset.name];
    return input.value === "" || (value !== null && side * (Number(input.value) - value) >= 0);
  });
  return within && [...document.querySelectorAll("#filters select")].every((select) => {
    const has = [episode[select.dataset.name]].flat();
    if (select.value === "any" || select.value === "none") {
      return (has.length > 0) === (select.value === "any");
    }
    return select.value === "" || has.includes(select.value.slice(2));
  });
}

function drawList() {
  const listed = data.episodes.filter(isListed);
  const table = document.getElementById("episodes");
  table.replaceChildren();
  const titles = [["episode", ""], ["reward", "number"], ["tokens", "number"], ["turns", "number"],
    ["trajectories", "number"], ["faults", ""]];
  addTable(table, titles, listed.map(listRow));
  const more = data.left_out ? `, of the last rollouts; ${data.left_out} are left out` : "";
  document.getElementById("about").textContent =
    `${data.run}: ${listed.length} of ${data.episodes.length} episodes that were written down${more}`;
}

function listRow(episode) {
  const numbers = [episode.reward, episode.num_tokens, episode.num_turns, episode.trajectories.length];
  const line = make("tr", { "data-episode": episode.key, tabindex: 0 }, make("td", {}, episode.key),
    ...numbers.map((value) => make("td", { class: "number" }, format(value))),
    make("td", {}, episode.faults.join(", ")));
  line.classList.toggle("chosen", episode.key === chosen);
  line.onclick = () => {
    chosen = episode.key;
    drawAll();
  };
  line.onkeydown = (event) => { if (event.key === "Enter") line.onclick(); };
  return line;
}

// ---- one episode

function drawShown() {
  const place = document.getElementById("shown");
  const episode = data.episodes.find((each) => each.key === chosen);
  place.hidden = !episode;
  if (!episode) return;
  const buttons = MEASURES.map((name) => {
    const pressed = String(name === measure);
    const button = make("button", { class: "log", "aria-pressed": pressed }, name);
    button.onclick = () => {
      measure = name;
      drawShown();
    };
    return button;
  });
  const facts = make("table");
  addTable(facts, [["what", ""], ["value", ""]], episode.facts.map(factRow));
  place.replaceChildren(
    make("h2", {}, episode.key), make("p", {}, "tokens coloured by ", ...buttons), facts,
    ...episode.trajectories.flatMap((each, number) => drawTrajectory(episode, each, number)));
}

function factRow([name, value]) {
  return make("tr", {}, make("td", {}, name), make("td", { class: "turn" }, value));
}

function drawTrajectory(episode, trajectory, number) {
  const several = episode.trajectories.length > 1;
  const compared = trajectory.mismatched === null ? "not compared" : `${trajectory.mismatched} mismatched`;
  const reward = trajectory.reward === null ? "could not be scored" : `reward ${format(trajectory.reward)}`;
  const told = episode.has_failed ? "failed" : `${reward}, ended by ${trajectory.finish_reason}, ${compared}`;
  const title = several ? `trajectory ${number}: ${told}` : told;
  const largest = Math.max(1e-9, ...trajectory.turns.flatMap((turn) => (
    [turn.advantages ?? 0].flat().map(Math.abs))));
  return [make("h2", {}, title), ...trajectory.turns.flatMap((turn) => drawTurn(turn, largest))];
}

function drawTurn(turn, largest) {
  const parts = turn.texts?.map((text, i) => drawToken(turn, text, i, largest)) ?? [turn.text];
  const block = make("div", { class: `turn ${turn.sampled ? "sampled" : "given"}` }, ...parts);
  return turn.branch ? [make("div", { class: "branch" }, turn.branch), block] : [block];
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

// ---- a run that goes on

async function look() {
  try {
    const answer = await fetch("data.json");
    const found = await answer.json();
    if (found.version !== data.version) {
      data = found;
      fillChoices();
      drawAll();
    }
  } catch {
    document.getElementById("about").textContent = "onpolicy episodes has ended: this is as it was";
  }
}

function drawAll() {
  drawList();
  drawShown();
}

addFilters();
fillChoices();
drawAll();
if (location.protocol.startsWith("http")) setInterval(look, 1000 * SECONDS_BETWEEN_LOOKS);
