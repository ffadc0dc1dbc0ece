"use strict";
const $ = (id) => document.getElementById(id);
const count = (n) => (n === null || n === undefined ? "-" : Math.round(n).toLocaleString("en-US"));
const iso = (ms) => new Date(ms).toISOString();

function span(ms) {
  if (ms === null || ms === undefined) return "-";
  for (const [unit, length] of [["d", 86400000], ["h", 3600000], ["min", 60000], ["s", 1000]])
    if (Math.abs(ms) >= length) return `${(ms / length).toFixed(1).replace(".0", "")} ${unit}`;
  return `${Math.round(ms)} ms`;
}

async function ask(path, options) {
  const answer = await fetch(path, { headers: { Accept: "application/json" }, ...options });
  const content = (await answer.text()) || "{}";
  let found;
  try { found = JSON.parse(content); } catch { found = { text: content }; }
  return { ok: answer.ok, code: answer.status, found };
}

// ---- theme
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  dispatchEvent(new Event("themed"));
});

// ---- parts that are loaded by themselves
for (const place of document.querySelectorAll("[data-load]")) {
  const load = async () => {
    try {
      const answer = await fetch(place.dataset.load);
      const text = await answer.text();
      if (answer.ok) place.innerHTML = text; // escaped by the server's templates
      else place.textContent = JSON.parse(text).reason;
    } catch { place.textContent = "no answer from the API: is it running?"; }
  };
  load();
  if (place.dataset.every) setInterval(() => { if (!document.hidden) load(); }, place.dataset.every * 1000);
}

// ---- charts
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Times of an axis, in UTC: no finer than its steps, and with the date where that changes.
function times(u, splits, axis, space, step) {
  let day = "";
  return splits.map((s) => {
    const text = iso(s * 1000), date = text.slice(5, 10);
    if (step >= 86400) return date;
    const label = `${text.slice(11, step >= 60 ? 16 : 19)}${date === day ? "" : `\n${date}`}`;
    day = date;
    return label;
  });
}

function chart(place, series, data, more = {}) {
  const line = { stroke: css("--line"), width: 1 };
  const axis = { stroke: css("--soft"), grid: line, ticks: line };
  const options = {
    width: place.clientWidth, height: place.clientHeight - 34,
    tzDate: (s) => uPlot.tzDate(new Date(s * 1e3), "Etc/UTC"),
    axes: [{ ...axis, values: times }, { ...axis, size: 62 }],
    scales: { y: { range: (u, low, high) => [0, Math.max(1, high * 1.1)] } },
    series: [{ label: "UTC", value: (u, s) => (s === null ? "-" : iso(s * 1000).slice(0, 19).replace("T", " ")) }, ...series.map(([label, color, extra]) => ({ label, stroke: css(color), width: 2, spanGaps: true, points: { show: false }, ...extra }))],
    ...more,
  };
  place.replaceChildren();
  return new uPlot(options, data, place);
}

// ---- overview
const trouble = $("trouble");
function show(field, text) {
  const place = document.querySelector(`[data-field="${field}"]`);
  if (place && place.textContent !== text) place.textContent = text;
}
let charts = [];
function draw(history) {
  if (!$("rates")) return;
  const columns = [0, 1, 2, 3, 4].map((i) => history.map((point) => (i ? point[i] : point[0] / 1000)));
  const sets = [[columns[0], columns[1], columns[2]], [columns[0], columns[3], columns[4]]];
  if (charts.length) charts.forEach((c, i) => c.setData(sets[i]));
  else charts = [
    chart($("rates"), [["in", "--series-1"], ["out", "--series-2"]], sets[0]),
    chart($("lateness"), [["median", "--series-1"], ["99 %", "--series-2"]], sets[1]),
  ];
}
function list(troubles) {
  const place = $("troubles");
  if (!place) return;
  const lines = troubles.map((t) => `${t.name}: ${t.text} (since ${iso(t.since).slice(0, 19).replace("T", " ")} UTC)`);
  if (place.dataset.shown !== lines.join()) place.replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
  place.dataset.shown = lines.join();
  place.hidden = !lines.length;
}
let lastHistory = [];
async function live() {
  if (!trouble) return;
  let problem = null;
  try {
    const { ok, found, code } = await ask("/ui/data/overview");
    if (!ok) problem = code === 401 ? "you are logged out: log in again" : found.reason;
    else {
      problem = found.trouble;
      // Figures of a job that says nothing more are not shown as if they were of now.
      const dead = Boolean(found.trouble);
      show("state", dead ? (found.state === "unknown" ? "unknown" : `${found.state}?`) : found.isHeldUp ? "held up" : found.state);
      show("stateHint", dead ? "figures are not shown: they are not of now" : found.isHeldUp ? "the senders are behind, so nothing is read" : `since ${iso(found.startedAt).slice(0, 19).replace("T", " ")} UTC, last batch ${span(found.lastBatchAge)} ago`);
      for (const name of ["pending", "takenPerSecond", "deliveredPerSecond", "inFlight"]) show(name, dead ? "-" : count(found[name]));
      for (const name of ["lateP50", "lateP99", "lookaheadMillis"]) show(name, dead ? "-" : span(found[name]));
      show("pendingHint", dead ? "messages that wait" : `messages that wait, ${count(found.inState)} in state`);
      list(dead ? [] : found.troubles);
      if (found.history.length) { lastHistory = found.history; draw(lastHistory); }
    }
  } catch { problem = "no answer from the API: is it running?"; }
  trouble.textContent = problem || "";
  trouble.hidden = !problem;
  if ($("live")) $("live").setAttribute("aria-busy", "false");
}
live();
setInterval(() => { if (!document.hidden) live(); }, 2000);
addEventListener("themed", () => { charts = []; if (lastHistory.length) draw(lastHistory); drawBars(); });
addEventListener("resize", () => { charts.forEach((c) => c.setSize({ width: c.root.parentElement.clientWidth, height: c.height })); drawBars(); });

// ---- schedule
const schedule = $("schedule");
let bars = null;
function messagesOf(from, before) {
  const query = new URLSearchParams({ topic: schedule.dataset.topic, subscription: schedule.dataset.subscription, dueFrom: from, dueBefore: before });
  return `/ui/messages?${query}`;
}
function drawBars() {
  if (!bars) return;
  const data = [bars.bars.map((b) => (b[0] + bars.width / 2) / 1000), bars.bars.map((b) => b[1])];
  const spans = [["hour", 3600000], ["day", 86400000], ["week", 604800000], ["month", 2592000000], ["year", 31622400000]];
  const plot = chart($("bars"), [["messages", "--series-1", { fill: css("--series-1"), paths: uPlot.paths.bars({ size: [0.9, 40] }) }]], data, {
    cursor: { drag: { x: true, y: false, setScale: false } },
    hooks: { setSelect: [(u) => {
      if (u.select.width < 8) return;
      const from = Math.round(u.posToVal(u.select.left, "x") * 1000), to = Math.round(u.posToVal(u.select.left + u.select.width, "x") * 1000);
      const [name] = spans.find(([, length]) => length >= to - from) || spans.at(-1);
      if (name === schedule.dataset.span) location.assign(messagesOf(from, to));
      else location.assign(`/ui/schedule?${new URLSearchParams({ topic: schedule.dataset.topic, subscription: schedule.dataset.subscription, start: from, span: name })}`);
    }] },
  });
  plot.over.addEventListener("click", () => {
    const i = plot.cursor.idx;
    if (plot.select.width < 8 && i !== null && i !== undefined) location.assign(messagesOf(bars.bars[i][0], bars.bars[i][0] + bars.width));
  });
}
if (schedule) (async () => {
  const { topic, subscription, start, span: name } = schedule.dataset;
  const { ok, found } = await ask(`/ui/data/schedule?${new URLSearchParams({ topic, subscription, start, span: name })}`);
  schedule.setAttribute("aria-busy", "false");
  if (!ok) { $("schedule-note").textContent = found.reason; return; }
  bars = found;
  const total = bars.bars.reduce((sum, b) => sum + b[1], 0);
  $("schedule-note").textContent = `${count(total)} messages due in this window, ${span(bars.width)} a bar · version ${bars.version} of delayed_index, as of ${iso(bars.asOf).slice(0, 19).replace("T", " ")} UTC`;
  drawBars();
  for (const [at, n] of bars.bars.filter((b) => b[1])) {
    const row = $("bars-table").tBodies[0].insertRow();
    const link = document.createElement("a");
    link.href = messagesOf(at, at + bars.width);
    link.textContent = iso(at).replace("T", " ").replace(".000Z", " UTC");
    row.insertCell().append(link);
    const cell = row.insertCell();
    cell.className = "n";
    cell.textContent = count(n);
  }
})();

// ---- actions on messages
const actions = $("actions");
const WORDS = {
  cancel: ["Cancel", "They will not be delivered. Until their time comes this can be undone (Restore). A message is cancelled with its whole entry."],
  skip: ["Skip", "They will not be delivered to these subscriptions. Until their time comes this can be undone (Restore)."],
  reschedule: ["Reschedule", "They are delivered at the time below instead, and keep their ids."],
  deliverNow: ["Deliver now", "They are delivered at once. This can't be undone."],
  restore: ["Restore", "Cancels and skips of them are undone: they are delivered at their time."],
};
function picked() { return [...document.querySelectorAll(".pick:checked")]; }
function update() { $("picked").textContent = count(picked().length); }
function base(topic) { return `/admin/v2/${topic.replace("://", "/").split("/").map(encodeURIComponent).join("/")}`; }

async function post(path, content) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json", Accept: "application/json", Prefer: "return=representation" }, body: JSON.stringify(content) });
}

// One call for each subscription, and for a cancel each entry: what to send, and how many messages it is about.
function callsOfSelected(action, time) {
  const byName = new Map();
  for (const box of picked()) for (const name of JSON.parse(box.dataset.names)) {
    if (!JSON.parse(actions.dataset.names).includes(name)) continue;
    byName.set(name, [...(byName.get(name) || []), box]);
  }
  const root = base(actions.dataset.topic);
  const calls = [];
  for (const [name, boxes] of byName) {
    const ids = boxes.map((box) => box.value);
    const path = `${root}/subscription/${encodeURIComponent(name)}`;
    if (action === "cancel") {
      for (const box of boxes) {
        const [ledgerId, entryId] = box.value.split(":");
        calls.push([`${root}/cancelDelayedMessage`, { ledgerId, entryId, deliverAt: box.dataset.due, subscriptionNames: [name] }]);
      }
    } else if (action === "skip") calls.push([`${path}/skipByMessageIds`, ids]);
    else if (action === "reschedule") calls.push([`${path}/reschedule`, { messageIds: ids, deliverAt: time }]);
    else calls.push([`${path}/${action}`, ids]);
  }
  return calls;
}
function callsOfAll(action, time, dryRun) {
  const filter = JSON.parse(actions.dataset.filter);
  if (action === "restore") delete filter.state;
  const content = { filter, dryRun, max: 1000000 };
  if (action === "reschedule") content.deliverAt = time || 0;
  return JSON.parse(actions.dataset.names).map((name) => [`${base(actions.dataset.topic)}/subscription/${encodeURIComponent(name)}/${action}`, content]);
}
function mark(outcomes) {
  for (const box of document.querySelectorAll(".pick")) {
    const [ledger, entry, index] = box.value.split(":").map(Number);
    const own = outcomes.filter((o) => o.ledgerId === ledger && o.entryId === entry && (o.batchIndex < 0 || index === undefined || o.batchIndex === index));
    const cell = box.closest("tr")?.querySelector(".result");
    if (own.length && cell) cell.textContent = [...new Set(own.map((o) => `${o.subscription}: ${o.result}`))].join(", ");
  }
}
async function run(calls) {
  const results = {}, reasons = new Set(), outcomes = [];
  for (const [path, content] of calls) {
    const { ok, found } = await post(path, content);
    for (const o of found.outcomes || []) { results[o.result] = (results[o.result] || 0) + 1; outcomes.push(o); }
    for (const [name, n] of Object.entries(found)) if (typeof n === "number" && name !== "matched" && n) results[name] = (results[name] || 0) + n;
    if (!ok) reasons.add(found.reason);
  }
  mark(outcomes);
  const counts = Object.entries(results).map(([name, n]) => `${count(n)} ${name}`).join(", ");
  return [counts || (reasons.size ? "" : "nothing to do"), ...reasons].filter(Boolean).join(" · ");
}
if (actions) {
  const dialog = $("confirm");
  const problem = (text) => { $("confirm-problem").textContent = text || ""; $("confirm-problem").hidden = !text; };
  let action = null;
  update();
  document.addEventListener("change", (event) => {
    if (event.target.id === "pick-all") for (const box of document.querySelectorAll(".pick")) box.checked = event.target.checked;
    update();
  });
  const isAll = () => document.querySelector("[name=scope]:checked").value === "all";
  for (const button of actions.querySelectorAll("[data-action]")) button.addEventListener("click", async () => {
    action = button.dataset.action;
    $("told").textContent = "";
    const [title, text] = WORDS[action];
    let n = picked().length;
    let who = `for ${JSON.parse(actions.dataset.names).join(", ")}`;
    if (isAll()) {
      $("told").textContent = "counting what matches …";
      const answers = [];
      for (const [path, content] of callsOfAll(action, 0, true)) answers.push(await post(path, content));
      const failed = answers.find((a) => !a.ok);
      $("told").textContent = failed ? failed.found.reason : "";
      if (failed) return;
      n = Math.max(...answers.map((a) => a.found.matched));
      who = JSON.parse(actions.dataset.names).map((name, i) => `${count(answers[i].found.matched)} for ${name}`).join(", ");
    }
    if (!n) { $("told").textContent = isAll() ? "Nothing matches." : "Select some messages first."; return; }
    $("confirm-title").textContent = `${title} ${count(n)} message${n === 1 ? "" : "s"}?`;
    $("confirm-text").textContent = `${text} (${who})`;
    $("confirm-time").hidden = action !== "reschedule";
    problem("");
    dialog.showModal();
  });
  $("confirm-no").addEventListener("click", () => dialog.close());
  $("confirm-yes").addEventListener("click", async () => {
    let time = null;
    if (action === "reschedule") {
      const text = $("when").value.trim();
      time = /^\d+$/.test(text) ? Number(text) : /(Z|[+-]\d\d:?\d\d)$/.test(text) ? Date.parse(text) : NaN;
      if (!Number.isFinite(time)) { problem("Give a time with its zone, as 2030-01-31T09:00:00Z, or ms since the epoch."); return; }
    }
    $("confirm-yes").disabled = true;
    $("told").textContent = "waiting for the job …";
    dialog.close();
    try { $("told").textContent = `${WORDS[action][0]}: ${await run(isAll() ? callsOfAll(action, time, false) : callsOfSelected(action, time))}`; }
    catch { $("told").textContent = "no answer from the API: is it running?"; }
    $("confirm-yes").disabled = false;
  });
}
