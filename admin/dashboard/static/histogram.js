"use strict";
// The schedule's histogram: how many deliveries are due, by time. Their bars are stacked by subscription, but on a
// logarithmic scale, where a part's height says nothing: there a bar is the sum.
const schedule = $("schedule"), logScale = $("log-scale");
const COLORS = 6; // --series-1 ... in app.css
const color = (i) => `--series-${(i % COLORS) + 1}`;
let found = null, plot = null, at = null;

const isoTime = (ms) => new Date(ms).toISOString().replace(".000Z", "Z");
const query = (more) => new URLSearchParams({ topic: schedule.dataset.topic, subscription: schedule.dataset.subscription, ...more });
const messagesOf = (from, before) => `/ui/messages?${query({ dueFrom: isoTime(from), dueBefore: isoTime(before) })}`;
const total = (bar) => bar.slice(1).reduce((sum, n) => sum + n, 0);

// With a few bars that are far higher than the others these are hardly to be seen, unless the scale is logarithmic.
function isSteep(bars) {
  const sizes = bars.map(total).filter((n) => n).sort((a, b) => a - b);
  return sizes.length > 1 && sizes.at(-1) > 30 * sizes[Math.floor(sizes.length / 2)];
}

function legend(place, i) {
  const bar = i === null ? null : found.bars[i];
  const sizes = found.subscriptions.map((name, s) => (bar ? bar[s + 1] : found.bars.reduce((sum, b) => sum + b[s + 1], 0)));
  const entries = found.subscriptions.map((name, s) => [css(color(s)), name, count(sizes[s])]);
  if (logScale.checked && entries.length > 1) entries.unshift([css("--text"), "all", count(sizes.reduce((sum, n) => sum + n, 0))]);
  if (plot && isInView(plot)) entries.push([css("--soft"), "the senders at their best so far", count(capacity())]);
  showLegend(place, bar ? `${stamp(bar[0])}, ${span(found.width)}:` : "", entries);
}

// What the senders can take in the time of a bar: the most that the job has sent a second since it started.
const capacity = () => Math.round((found.mostPerSecond * found.width) / 1000);

const rate = () => `${count(found.mostPerSecond)} a second`;
const isInView = (u) => capacity() > 0 && capacity() <= u.scales.y.max;

function drawCapacity(u) {
  if (!isInView(u)) return;
  const y = u.valToPos(capacity(), "y", true), { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = css("--soft");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
}

function onSelect(u) {
  if (u.select.width < 8) return;
  const [left, right] = [u.select.left, u.select.left + u.select.width].map((x) => Math.round(u.posToVal(x, "x") * 1000));
  const start = Math.floor(left / found.width) * found.width, end = Math.ceil(right / found.width) * found.width;
  location.assign(found.width > 1000 ? `/ui/schedule?${query({ start: isoTime(start), end: isoTime(end) })}` : messagesOf(start, end));
}

function draw() {
  if (!found) return;
  const isLog = logScale.checked;
  plot = null;
  // The last of the stack is the highest and is drawn first; each next one covers what is below it.
  const last = found.subscriptions.length - 1;
  const stack = found.subscriptions.map((name, s) => [name, color(s), found.bars.map((bar) => total(bar.slice(0, s + 2)))]).reverse();
  const shown = isLog && last ? [["all", "--text", found.bars.map(total)]] : stack;
  const data = [found.bars.map((bar) => (bar[0] + found.width / 2) / 1000), ...shown.map(([, , sizes]) => sizes)];
  const highest = (high) => Math.max(isLog ? 10 : 1, high * (isLog ? 1.5 : 1.1), capacity() < high * (isLog ? 30 : 3) ? capacity() * 1.1 : 0);
  const powers = (u, axis, low, high) => [0, ...Array.from({ length: 12 }, (_, i) => 10 ** i)].filter((n) => n <= high);
  const brief = (n) => (n >= 1e6 ? `${n / 1e6} M` : n.toLocaleString("en-US"));
  plot = chart($("bars"), shown.map(([name, hue]) => [name, hue, { fill: css(hue), width: 0, paths: uPlot.paths.bars({ size: [0.9, 60] }) }]), data, legend, {
    cursor: { drag: { x: true, y: false, setScale: false } },
    scales: { x: { range: () => [found.bars[0][0] / 1000, (found.bars.at(-1)[0] + found.width) / 1000] }, y: { ...(isLog ? { distr: 4, asinh: 1 } : {}), range: (u, low, high) => [0, highest(high)] } },
    axisY: isLog ? { splits: powers, filter: (u, splits) => splits, values: (u, values) => values.map(brief) } : { values: (u, values) => values.map(brief) },
    hooks: { setSelect: [onSelect], draw: [drawCapacity] },
  });
  plot.rest();
  plot.over.addEventListener("click", () => {
    const i = plot.cursor.idx;
    if (plot.select.width < 8 && i !== null && i !== undefined) open(i);
  });
}
const open = (i) => location.assign(messagesOf(found.bars[i][0], found.bars[i][0] + found.width));

function asTable() {
  const table = $("bars-table"), head = table.tHead.insertRow();
  head.innerHTML = '<th>From, <span class="zone">UTC</span></th>';
  for (const name of found.subscriptions) head.append(Object.assign(document.createElement("th"), { className: "n", textContent: name }));
  for (const bar of found.bars.filter(total)) {
    const row = table.tBodies[0].insertRow(), link = document.createElement("a"), time = document.createElement("time");
    link.href = messagesOf(bar[0], bar[0] + found.width);
    time.dateTime = new Date(bar[0]).toISOString();
    time.dataset.form = "short";
    link.append(time);
    row.insertCell().append(link);
    for (const n of bar.slice(1)) Object.assign(row.insertCell(), { className: "n", textContent: count(n) });
  }
  showTimes(table);
  nameCells(schedule);
}

function note() {
  const due = found.bars.reduce((sum, bar) => sum + total(bar), 0);
  const parts = [`${count(due)} deliveries due in this window, ${span(found.width)} a bar`];
  if (found.before) parts.push(`${count(found.before)} going out now`);
  if (found.after) parts.push(`${count(found.after)} later`);
  if (found.mostPerSecond) parts.push(`the senders' best so far: ${rate()}`);
  parts.push(`version ${found.version} of delayed_index, as of ${stamp(found.asOf)}`);
  $("steep").hidden = logScale.checked || !isSteep(found.bars);
  $("schedule-note").textContent = parts.join(" · ");
}

(async () => {
  const { start, end, span: name } = schedule.dataset;
  const answer = await ask(`/ui/data/schedule?${query({ start, end, span: name })}`);
  schedule.setAttribute("aria-busy", "false");
  if (!answer.ok) { $("schedule-note").textContent = answer.found.reason; return; }
  found = answer.found;
  logScale.checked = localStorage.getItem("log-scale") === "yes";
  note();
  draw();
  asTable();
})();
logScale.addEventListener("change", () => { localStorage.setItem("log-scale", logScale.checked ? "yes" : "no"); note(); draw(); });
addEventListener("drawn-anew", () => { if (found) { note(); draw(); } });
addEventListener("resize", draw);

// By keys: a bar further, and its messages.
$("bars").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (found && step) {
    event.preventDefault();
    at = Math.min(found.bars.length - 1, Math.max(0, at === null ? 0 : at + step));
    plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 1 });
  } else if (found && event.key === "Enter" && at !== null) open(at);
});
