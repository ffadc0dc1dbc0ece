"use strict";
// Times are shown in UTC or in the browser's zone, by a switch that is remembered. A time's tooltip has both.
const HERE = Intl.DateTimeFormat().resolvedOptions().timeZone || "local";
const isLocal = () => localStorage.getItem("zone") === "local";

function offset(ms) {
  const minutes = -new Date(ms).getTimezoneOffset(), size = Math.abs(minutes);
  return `${minutes < 0 ? "-" : "+"}${String(Math.floor(size / 60)).padStart(2, "0")}:${String(size % 60).padStart(2, "0")}`;
}
// As 2030-01-31 09:00:00.000, without the zone.
function clock(ms, local = isLocal()) {
  return new Date(local ? ms - new Date(ms).getTimezoneOffset() * 60000 : ms).toISOString().slice(0, 23).replace("T", " ");
}
const zoneOf = (ms, local = isLocal()) => (local ? offset(ms) : "UTC");
const stamp = (ms, places = 19) => `${clock(ms).slice(0, places)} ${zoneOf(ms)}`;

function showTimes(root = document) {
  for (const place of root.querySelectorAll("time[datetime]")) {
    const ms = Date.parse(place.dateTime);
    const text = { cell: clock(ms), short: clock(ms).slice(0, 19) }[place.dataset.form] || stamp(ms, 23);
    if (place.textContent !== text) place.textContent = text;
    place.title = `${clock(ms, false)} UTC\n${clock(ms, true)} ${offset(ms)} (${HERE})`;
  }
  for (const place of root.querySelectorAll(".zone")) place.textContent = isLocal() ? HERE : "UTC";
}

function showZone() {
  const button = document.getElementById("zone");
  button.textContent = isLocal() ? "Local" : "UTC";
  button.title = isLocal() ? `Times are of ${HERE}` : "Times are UTC";
  button.setAttribute("aria-label", isLocal() ? `Times are of ${HERE}: show UTC` : "Times are UTC: show local time");
  showTimes();
}
document.getElementById("zone").addEventListener("click", () => {
  localStorage.setItem("zone", isLocal() ? "UTC" : "local");
  showZone();
  dispatchEvent(new Event("drawn-anew"));
});
showZone();
