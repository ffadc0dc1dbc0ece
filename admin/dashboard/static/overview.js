"use strict";
// What an operator asks first: is it on time, does it keep up, what is stuck, what comes next.
const LATE_MILLIS = 1000; // as the alert DelaylakeLate has it
const SLOW_BATCH_MILLIS = 10000;
let lastHistory = [], lastStatus = null, waits = null, charts = [];

function show(field, text) {
  const place = document.querySelector(`[data-field="${field}"]`);
  if (place && place.textContent !== text) place.textContent = text;
}
function answer(id, figure, hint, grade = "") {
  const tile = $(id);
  tile.className = `tile ${grade}`;
  tile.querySelector(".figure").textContent = figure;
  tile.querySelector(".hint").textContent = hint;
}

// What is counted for each subscription is called so, and what is counted once a message.
const deliveries = (n) => `${count(n)} ${n === 1 ? "delivery" : "deliveries"}`;

function answers(found) {
  const unknown = () => "figures are not shown: they are not of now";
  if (!found || found.trouble) for (const id of ["on-time", "keeps-up", "stuck"]) answer(id, "unknown", unknown());
  else {
    const late = lastHistory.filter((point) => point[4] !== null).at(-1);
    if (!late) answer("on-time", "nothing due yet", "no planned message went out in the last quarter of an hour");
    else {
      const hint = `99 % went out within ${span(late[4])}, half within ${span(late[3])}`;
      answer("on-time", late[4] <= LATE_MILLIS ? "yes" : "late", hint, late[4] <= LATE_MILLIS ? "" : late[4] <= 10 * LATE_MILLIS ? "warn" : "bad");
    }
    const rates = `${count(found.takenPerSecond)} messages in, ${count(found.deliveredPerSecond)} deliveries out a second`;
    if (found.isHeldUp) answer("keeps-up", "no", "held up: the senders are behind, so nothing is read", "bad");
    else if (found.batchMillis > SLOW_BATCH_MILLIS) answer("keeps-up", "slowly", `the last batch took ${span(found.batchMillis)} · ${rates}`, "warn");
    else answer("keeps-up", "yes", rates);
    const held = Number(waits?.held || 0), heldText = held ? `${deliveries(held)} held back${waits.paused ? `, paused: ${waits.paused}` : ""}` : "";
    if (found.troubles.length) answer("stuck", `${found.troubles.length} trouble${found.troubles.length === 1 ? "" : "s"}`, [found.troubles[0].name, heldText].filter(Boolean).join(" · "), "bad");
    else answer("stuck", held ? `${deliveries(held)} held back` : "nothing", waits?.paused ? `paused: ${waits.paused}` : held ? "a destination or a route is missing" : "no trouble, nothing is held back", held ? "warn" : "");
  }
  if (!waits) return;
  const next = waits.next ? Math.max(0, Number(waits.next) - Date.now()) : null;
  const soon = [["minute", waits.minute], ["hour", waits.hour], ["day", waits.day]].map(([name, n]) => `${deliveries(Number(n))} in the next ${name}`);
  const isSoon = Number(waits.minute) > 0;
  answer("next", next === null ? "nothing" : isSoon ? `${deliveries(Number(waits.minute))} in a minute` : `in ${span(next)}`, soon.slice(isSoon ? 1 : 0).join(", "));
}
document.addEventListener("loaded", () => {
  waits = $("waits") ? { ...$("waits").dataset } : null;
  answers(lastStatus);
});

function draw() {
  const history = lastHistory;
  const columns = [0, 1, 2, 3, 4].map((i) => history.map((point) => (i ? point[i] : point[0] / 1000)));
  const sets = [[columns[0], columns[1], columns[2]], [columns[0], columns[3], columns[4]]];
  if (charts.length) { charts.forEach((c, i) => { c.setData(sets[i]); c.rest(); }); return; }
  const legend = (names, of, text) => (place, i) => {
    const point = lastHistory[i ?? lastHistory.length - 1];
    showLegend(place, i === null ? "" : stamp(point[0]), names.map((name, n) => [css(`--series-${n + 1}`), name, point[of + n] === null ? "none" : text(point[of + n])]));
  };
  charts = [
    chart($("rates"), [["messages in", "--series-1"], ["deliveries out", "--series-2"]], sets[0], legend(["messages in", "deliveries out"], 1, count)),
    chart($("lateness"), [["median", "--series-1"], ["99 %", "--series-2"]], sets[1], legend(["median", "99 %"], 3, span)),
  ];
}
function list(troubles) {
  const place = $("troubles");
  const lines = troubles.map((t) => `${t.name}: ${t.text} (since ${stamp(t.since)})`);
  if (place.dataset.shown !== lines.join()) place.replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
  place.dataset.shown = lines.join();
  place.hidden = !lines.length;
}

addEventListener("status", ({ detail: found }) => {
  // Figures of a job that says nothing more are not shown as if they were of now.
  const dead = Boolean(found.trouble);
  lastStatus = found;
  if (found.history.length) { lastHistory = found.history; draw(); }
  show("state", dead ? (found.state === "unknown" ? "unknown" : `${found.state}?`) : found.isHeldUp ? "held up" : found.state);
  for (const name of ["pending", "takenPerSecond", "deliveredPerSecond", "inFlight"]) show(name, dead ? "-" : count(found[name]));
  show("lookaheadMillis", dead ? "-" : span(found.lookaheadMillis));
  show("late", dead ? "-" : `${span(found.lateP50)}, ${span(found.lateP99)}`);
  show("startedAt", dead || !found.startedAt ? "-" : stamp(found.startedAt));
  list(dead ? [] : found.troubles);
  answers(found);
  $("live").setAttribute("aria-busy", "false");
});
addEventListener("drawn-anew", () => { charts = []; if (lastHistory.length) draw(); });
addEventListener("resize", () => charts.forEach((c) => c.setSize({ width: c.root.parentElement.clientWidth, height: c.height })));
