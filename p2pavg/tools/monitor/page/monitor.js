// The monitor's page. Everything that comes from a peer is put into the page as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const SHOWN_NAMES = 6;
const SHOWN_ROUNDS = 10;
const state = { run: null, metric: null, cursor: null, offset: 0, known: new Map() };
const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

// ---------------------------------------------------------------- texts

function number(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, String(Math.trunc(Math.abs(value))).length) });
}

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return `${number(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${number(bytes)} TB`;
}

function span(seconds) {
  if (seconds < 0.01) return "0 s";
  if (seconds < 10) return `${number(Math.max(seconds, 0), 2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

const now = () => Date.now() / 1000 + state.offset;
const ago = (at) => (now() - at < 3 ? "now" : `${span(now() - at)} ago`);
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
const short = (id) => `…${id.slice(-8)}`;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function nameOf(id) {
  const peer = state.known.get(id);
  return peer && peer.name ? peer.name : short(id);
}

function names(ids) {
  const shown = ids.slice(0, SHOWN_NAMES).map(nameOf).join(", ");
  return ids.length > SHOWN_NAMES ? `${shown} and ${ids.length - SHOWN_NAMES} more` : shown;
}

const pill = (text, kind) => make("span", { class: `pill ${kind}` }, text);
const empty = (text) => make("p", { class: "empty" }, text);

function cell(label, content, kind = "") {
  return make("td", { "data-label": label, class: kind }, ...(Array.isArray(content) ? content : [content]));
}

// ---------------------------------------------------------------- parts of the page

function showSummary(run) {
  const { summary } = run;
  const groups = run.rounds.filter((round) => round.group);
  const done = groups.filter((round) => round.results.success).length;
  const tiles = [
    ["Peers", number(summary.peers)],
    ["Update", number(summary.epoch, 9)],
    ["Samples/s", number(summary.samples_per_second)],
    ["Sent in rounds", size(summary.sent)],
    ["Last rounds done", `${done} of ${groups.length}`],
  ];
  const main = run.series.find((each) => each.name.includes("loss"));
  if (main && main.median.length) tiles.splice(2, 0, [main.name, number(main.median[main.median.length - 1][1])]);
  if (summary.drifted) tiles.push(["Drift", plural(summary.drifted, "peer"), "bad"]);
  $("summary").replaceChildren(
    ...tiles.map(([label, value, kind]) => make("div", { class: kind || "" }, make("dt", {}, label), make("dd", {}, value))),
  );
}

function showGiven(run) {
  $("gives").hidden = !run.gives;
  $("gives").textContent = run.gives;
}

// An auxiliary trains nothing: "idle", update 0 and no samples would read as if it did not help.
const helps = (peer) => peer.role === "auxiliary";

function activity(peer) {
  if (peer.gone !== null) return pill("gone", "bad");
  if (helps(peer)) return pill("helping", "good");
  const kinds = { computing: "good", waiting: "accent", following: "warn", idle: "" };
  return pill(peer.activity === "following" ? "catching up" : peer.activity, kinds[peer.activity] || "");
}

function certificate(peer) {
  if (!peer.expires) return peer.role;
  const left = peer.expires - now();
  const until = left > 0 ? `certificate for ${span(left)} more` : "certificate expired";
  return `${peer.roles.join(", ")} · ${until}`;
}

function rowOfPeer(peer) {
  const mbps = (value) => (value ? number(value, 3) : "–");
  const seen = peer.gone !== null ? `gone ${ago(peer.gone)}` : ago(peer.last_seen);
  const notes = [];
  if (peer.drift) notes.push(make("span", { class: "sub" }, pill("drift", "bad"), ` ${peer.drift}`));
  return make(
    "tr",
    { class: peer.gone !== null ? "gone" : "", "data-peer": peer.id },
    cell("Peer", [
      make("span", { class: "name" }, peer.name || short(peer.id), peer.me ? " (this peer)" : ""),
      make("span", { class: "sub" }, make("span", { class: "mono", title: peer.id }, short(peer.id)), ` ${certificate(peer)}`),
      ...notes,
    ]),
    cell("State", activity(peer)),
    cell("Update", helps(peer) ? "–" : number(peer.epoch, 9), "num"),
    cell("Samples/s", helps(peer) ? "–" : number(peer.samples_per_second), "num"),
    cell("Reachability", [peer.reach, make("span", { class: "sub" }, peer.reach_sentence)]),
    cell("Up / down", [`${mbps(peer.upload_mbps)} / ${mbps(peer.download_mbps)}`, make("span", { class: "sub" }, "Mbit/s")], "num"),
    cell("Rounds", [number(peer.rounds, 9), peer.failures ? make("span", { class: "sub" }, `${peer.failures} failed`) : ""], "num"),
    cell("Version", peer.version),
    cell("Last seen", [seen, make("span", { class: "sub" }, `up ${span(Math.max(peer.last_seen - peer.up_since, 0))}`)], "nowrap"),
  );
}

function showPeers(run) {
  const rows = run.peers.map(rowOfPeer);
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: 9 }, empty("No peer of this run has published a status yet."))));
  $("peers").tBodies[0].replaceChildren(...rows);
}

function resultOf(round) {
  const kinds = { success: "good", failed: "bad", no_peers: "" };
  const words = { success: "done", failed: "failed", no_peers: "no group" };
  const parts = Object.entries(round.results).sort().reverse();
  return parts.map(([kind, count]) => pill(parts.length > 1 ? `${words[kind]} for ${count}` : words[kind], kinds[kind]));
}

function rowOfRound(round) {
  const lost = round.lost.map((each) => (each.peer ? nameOf(each.peer) : each.key.slice(0, 6)));
  return make(
    "tr",
    {},
    cell("Ended", clock(round.at), "nowrap"),
    cell("Group", [
      make("span", { class: "mono" }, round.group ? round.group.slice(0, 8) : "–"),
      make("span", { class: "sub by" }, `by ${names(round.by)}`),
    ]),
    cell("Result", [...resultOf(round), round.reason ? make("span", { class: "sub" }, round.reason) : ""]),
    cell("Duration", span(round.duration), "num"),
    cell("Exchange", round.group ? span(round.exchange) : "–", "num"),
    cell("Members", round.group ? number(round.members) : "–", "num"),
    cell("Lost", [number(lost.length), lost.length ? make("span", { class: "sub" }, lost.join(", ")) : ""], "num"),
    cell("Clipped", number(round.clipped), "num"),
    cell("Sent", size(round.bytes), "num"),
  );
}

function showRounds(run) {
  const rows = run.rounds.slice(0, SHOWN_ROUNDS).map(rowOfRound);
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: 9 }, empty("No round has ended yet."))));
  $("rounds").tBodies[0].replaceChildren(...rows);
}

function showLineages(run) {
  const several = run.lineages.length > 1;
  const parts = run.lineages.map((branch, index) =>
    make(
      "div",
      { class: "branch" },
      pill(`update ${branch.epoch}`, several && index > 0 ? "warn" : "good"),
      " ",
      make("span", { class: "mono" }, branch.state.slice(0, 8)),
      make("p", {}, `${plural(branch.peers.length, "peer")}: ${names(branch.peers)}`),
    ),
  );
  if (several) parts.unshift(make("p", { class: "empty" }, `The run has ${run.lineages.length} different states: only peers of one state average together.`));
  if (run.not_compared.length) parts.push(make("p", { class: "empty" }, `Not compared yet: ${names(run.not_compared)}`));
  for (const peer of run.peers.filter((each) => each.drift && each.gone === null)) {
    parts.push(make("div", { class: "branch" }, pill("drift", "bad"), make("p", {}, `${nameOf(peer.id)} says: ${peer.drift}`)));
  }
  for (const each of run.excluded) parts.push(make("div", { class: "branch" }, pill("excluded", "bad"), make("p", {}, `${nameOf(each.peer)}: ${each.reason}`)));
  $("lineages").replaceChildren(...(parts.length ? parts : [empty("No peer of this run trains now.")]));
}

function showTransfers(run) {
  const parts = run.transfers.map((each) => {
    const label = `${nameOf(each.peer)} ${each.upload ? "sends to" : "fetches from"} ${plural(each.peers, "peer")}`;
    const total = each.total ? `${size(each.done)} of ${size(each.total)}` : size(each.done);
    return make(
      "div",
      { class: "branch" },
      make("span", { class: "name" }, label),
      make("span", { class: "sub" }, `${total}, ${size(each.bytes_per_second)}/s`),
      each.total ? make("progress", { max: each.total, value: each.done, "aria-label": label }) : null,
    );
  });
  $("transfers").replaceChildren(...(parts.length ? parts : [empty("No peer fetches a state now.")]));
}

function showNews(run) {
  const bad = new Set(["gone", "failed", "lost", "drift", "excluded"]);
  const items = run.news.map((each) =>
    make("li", {}, make("time", {}, clock(each.at)), make("span", { class: bad.has(each.kind) ? "bad" : "" }, `${nameOf(each.peer)} ${each.text}`)),
  );
  $("news").replaceChildren(...(items.length ? items : [make("li", {}, empty("Nothing has happened yet."))]));
}

function announce(run) {
  const newest = run.news.filter((each) => ["gone", "came", "excluded"].includes(each.kind))[0];
  const text = newest ? `${nameOf(newest.peer)} ${newest.text}` : "";
  if ($("announce").textContent !== text) $("announce").textContent = text;
}

// ---------------------------------------------------------------- the curve

const WIDTH = 560, HEIGHT = 300, LEFT = 56, RIGHT = 14, TOP = 14, BOTTOM = 34;

const MAX_TICKS = 20;

// Peers may report any number: near 2^53 or 1e17 a step can be too small to change the number that it is added to.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw) || raw;
  const first = Math.ceil(low / step);
  const found = [];
  for (let index = 0; index < MAX_TICKS; index++) {
    const at = (first + index) * step;
    if (!(at <= high + step * 1e-9)) break;
    const tick = Number(at.toPrecision(12));
    if (!found.includes(tick)) found.push(tick);
  }
  return found;
}

// A range that is wide enough to be divided, also around a large number.
function widened(low, high) {
  const least = Math.max(Math.abs(low), Math.abs(high)) * 1e-9;
  if (high - low > least) return [low, high];
  const half = Math.max(0.5, least);
  return [low - half, high + half];
}

function pickMetric(run) {
  const known = run.series.map((each) => each.name);
  if (!known.includes(state.metric)) state.metric = known[0] || null;
  const select = $("metric");
  const shown = [...select.options].map((each) => each.value);
  if (shown.join("\n") !== known.join("\n")) {
    select.replaceChildren(...known.map((name) => make("option", { value: name }, name)));
  }
  select.value = state.metric || "";
  select.disabled = !known.length;
}

function showCurve(run) {
  pickMetric(run);
  const series = run.series.find((each) => each.name === state.metric);
  if (!series || !series.median.length) {
    $("curve").replaceChildren(empty("No peer has reported a metric yet."));
    return;
  }
  const lines = Object.values(series.peers);
  const values = [series.median, ...lines].flat().map((point) => point[1]);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  [low, high] = widened(low, high);
  high += (high - low) * 0.05;
  const first = series.median[0][0];
  const last = Math.max(series.median[series.median.length - 1][0], first + Math.max(1, first * 1e-9));
  const x = (at) => LEFT + ((at - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const path = (points) => points.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const newest = series.median[series.median.length - 1];
  const label = `${series.name}: from ${number(series.median[0][1])} at update ${series.median[0][0]} to ${number(newest[1])} at update ${newest[0]}. Arrow keys move along the curve.`;
  const focused = document.activeElement && document.activeElement.id === "curve-svg";
  const svg = draw("svg", { id: "curve-svg", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": label });
  for (const value of ticks(low, high, 5)) {
    svg.append(
      draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      draw("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, number(value)),
    );
  }
  for (const at of ticks(first, last, 6).filter(Number.isInteger)) {
    svg.append(draw("text", { x: x(at), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, String(at)));
  }
  svg.append(draw("text", { x: WIDTH - RIGHT, y: HEIGHT - 2, "text-anchor": "end" }, "update"));
  for (const points of lines) svg.append(draw("path", { class: "peer-line", d: path(points) }));
  svg.append(draw("path", { class: "median", d: path(series.median) }));
  showCursor(svg, series, x, y);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first);
    moveCursor(series.median.reduce((best, point, index) => (Math.abs(point[0] - at) < Math.abs(series.median[best][0] - at) ? index : best), 0));
  });
  svg.addEventListener("pointerleave", () => moveCursor(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = state.cursor === null ? series.median.length - 1 : state.cursor;
    moveCursor(Math.min(Math.max(from + step, 0), series.median.length - 1));
  });
  $("curve").replaceChildren(svg);
  if (focused) svg.focus();
}

function moveCursor(index) {
  if (index === state.cursor) return;
  state.cursor = index;
  showCurve(state.run);
}

function showCursor(svg, series, x, y) {
  if (state.cursor === null) return;
  const point = series.median[Math.min(state.cursor, series.median.length - 1)];
  const text = `update ${point[0]}: ${number(point[1], 4)}`;
  const right = x(point[0]) > WIDTH / 2;
  svg.append(
    draw("line", { class: "cursor", x1: x(point[0]), x2: x(point[0]), y1: TOP, y2: HEIGHT - BOTTOM }),
    draw("circle", { class: "at", cx: x(point[0]), cy: y(point[1]), r: 5 }),
    draw("text", { class: "tip", x: x(point[0]) + (right ? -10 : 10), y: TOP + 10, "text-anchor": right ? "end" : "start" }, text),
  );
}

// ---------------------------------------------------------------- the map of exchanges

const ORDER = ["relayed", "stream", "lane"];

function showMap(run) {
  const peers = run.peers.filter((peer) => peer.gone === null).slice(0, 48);
  if (!peers.length) {
    $("map").replaceChildren(empty("No peer is there."));
    return;
  }
  const [width, height, margin] = [560, 330, 46];
  const places = new Map();
  peers.forEach((peer, index) => {
    const angle = (2 * Math.PI * index) / peers.length - Math.PI / 2;
    const alone = peers.length === 1;
    places.set(peer.id, [
      width / 2 + (alone ? 0 : Math.cos(angle) * (width / 2 - 110)),
      height / 2 + (alone ? 0 : Math.sin(angle) * (height / 2 - margin)),
      Math.cos(angle),
      Math.sin(angle),
    ]);
  });
  const edges = run.exchanges.filter((each) => places.has(each.one) && places.has(each.other));
  const label = `${plural(peers.length, "peer")}, ${plural(edges.length, "pair")} exchanged in their last rounds.`;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const edge of edges) {
    const said = Object.values(edge.said);
    const way = ORDER.find((each) => said.includes(each));
    const [one, other] = [places.get(edge.one), places.get(edge.other)];
    const kinds = `edge ${way}${said.length < 2 ? " one" : ""}`;
    const text = `${nameOf(edge.one)} – ${nameOf(edge.other)}: ${said.join(" / ")}${said.length < 2 ? " (only one of the two says so)" : ""}`;
    svg.append(draw("line", { class: kinds, x1: one[0], y1: one[1], x2: other[0], y2: other[1] }, draw("title", {}, text)));
  }
  for (const peer of peers) {
    const [x, y, across, down] = places.get(peer.id);
    const text = peer.name || short(peer.id);
    const anchor = Math.abs(across) < 0.2 ? "middle" : across > 0 ? "start" : "end";
    const dy = Math.abs(across) < 0.2 ? (down > 0 ? 24 : -16) : 4;
    svg.append(
      draw("circle", { class: "node", cx: x, cy: y, r: 9 }, draw("title", {}, `${text} (${peer.id})`)),
      draw("text", { class: "label", x: x + (anchor === "middle" ? 0 : across > 0 ? 15 : -15), y: y + dy, "text-anchor": anchor }, text.length > 15 ? `${text.slice(0, 14)}…` : text),
    );
  }
  $("map").replaceChildren(svg);
}

// ---------------------------------------------------------------- live

function show() {
  const run = state.run;
  if (!run) return;
  state.known = new Map(run.peers.map((peer) => [peer.id, peer]));
  $("run").textContent = run.run;
  document.title = `${run.run} · ${plural(run.summary.peers, "peer")} · p2pavg`;
  for (const part of [showSummary, showGiven, showPeers, showCurve, showMap, showRounds, showLineages, showTransfers, showNews, announce]) part(run);
}

function live(kind, text) {
  $("live").dataset.state = kind;
  if ($("live-text").textContent !== text) $("live-text").textContent = text;
}

function listen() {
  const source = new EventSource("api/events");
  source.onopen = () => live("on", "live");
  source.onmessage = (event) => {
    state.run = JSON.parse(event.data);
    state.offset = state.run.now - Date.now() / 1000;
    live("on", "live");
    show();
  };
  source.onerror = () => {
    live("off", "connection lost, trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

$("metric").addEventListener("change", (event) => {
  state.metric = event.target.value;
  state.cursor = null;
  show();
});
setInterval(() => state.run && showPeers(state.run), 5000); // ages grow also while nothing happens
listen();
