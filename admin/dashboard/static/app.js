"use strict";
const $ = (id) => document.getElementById(id);
const count = (n) => (n === null || n === undefined ? "-" : Math.round(n).toLocaleString("en-US"));

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
  dispatchEvent(new Event("drawn-anew"));
});

// ---- tables: on a narrow screen a row is a card, in which each cell has its column's name before it (app.css)
function nameCells(root = document) {
  for (const table of root.querySelectorAll(".scroll table")) {
    const names = [...table.tHead.querySelectorAll("th")].map((head) => head.firstChild?.textContent.replace(/, $/, "") ?? "");
    for (const row of table.tBodies[0].rows)
      if (row.cells.length === names.length) [...row.cells].forEach((cell, i) => { cell.dataset.name = names[i]; });
  }
}
nameCells();

// ---- parts that are loaded by themselves
async function loadPart(place, path) {
  try {
    const answer = await fetch(path);
    const text = await answer.text();
    if (answer.ok) place.innerHTML = text; // escaped by the server's templates
    else place.textContent = JSON.parse(text).reason;
  } catch { place.textContent = "no answer from the API: is it running?"; }
  showTimes(place);
  nameCells(place);
  place.dispatchEvent(new Event("loaded", { bubbles: true }));
}
for (const place of document.querySelectorAll("[data-load]")) {
  const load = () => loadPart(place, place.dataset.load);
  load();
  if (place.dataset.every) setInterval(() => { if (!document.hidden) load(); }, place.dataset.every * 1000);
}
// A line of the control log is opened to its messages.
document.addEventListener("click", (event) => {
  const button = event.target.closest(".opens");
  if (!button) return;
  const row = button.closest("tr"), isOpen = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!isOpen));
  if (isOpen) { row.nextElementSibling.remove(); return; }
  const opened = document.createElement("tr"), cell = opened.insertCell();
  cell.colSpan = row.cells.length;
  cell.textContent = "loading …";
  row.after(opened);
  loadPart(cell, button.dataset.part);
});

// ---- whether the job does its work, on every page
const trouble = $("trouble");
async function live() {
  if (!trouble) return;
  let problem = null;
  try {
    const { ok, found, code } = await ask("/ui/data/overview");
    if (!ok) problem = code === 401 ? "you are logged out: log in again" : found.reason;
    else {
      problem = found.trouble;
      dispatchEvent(new CustomEvent("status", { detail: found }));
    }
  } catch { problem = "no answer from the API: is it running?"; }
  trouble.textContent = problem || "";
  trouble.hidden = !problem;
}
addEventListener("DOMContentLoaded", live);
setInterval(() => { if (!document.hidden) live(); }, 2000);

// ---- keys
const PAGES = { o: "/", s: "/ui/schedule", m: "/ui/messages", r: "/ui/recurring", d: "/ui/retries", c: "/ui/control", b: "/ui/storage" };
let wasG = false;
function goToRow(step) {
  const rows = [...document.querySelectorAll("#messages tbody tr")];
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("at"));
  const next = rows[Math.min(rows.length - 1, Math.max(0, at + step))];
  if (at >= 0) rows[at].classList.remove("at");
  next.classList.add("at");
  next.querySelector("a").focus();
}
const KEYS = {
  "?": () => $("keys").showModal(),
  "/": () => document.querySelector(".filters input, .filters select")?.focus(),
  z: () => $("zone").click(),
  t: () => $("theme").click(),
  j: () => goToRow(1),
  k: () => goToRow(-1),
  x: () => document.querySelector("#messages tr.at .pick")?.click(),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;
  const run = wasG && PAGES[event.key] ? () => location.assign(PAGES[event.key]) : KEYS[event.key];
  wasG = event.key === "g";
  if (run) { event.preventDefault(); run(); }
});
