"use strict";
// Searches that this browser keeps, as links.
const KEPT = "searches";
const read = () => JSON.parse(localStorage.getItem(KEPT) || "[]");
function write(kept) { localStorage.setItem(KEPT, JSON.stringify(kept)); showSearches(); }

function showSearches() {
  const place = $("searches"), kept = read();
  place.hidden = !kept.length;
  place.replaceChildren(...kept.map(([name, query], i) => {
    const part = document.createElement("span"), link = document.createElement("a"), remove = document.createElement("button");
    link.href = `/ui/messages?${query}`;
    link.textContent = name;
    Object.assign(remove, { type: "button", textContent: "×" });
    remove.setAttribute("aria-label", `Remove the saved search ${name}`);
    remove.addEventListener("click", () => write(read().filter((_, n) => n !== i)));
    part.append(link, remove);
    return part;
  }));
}
$("keep").addEventListener("click", () => {
  const form = $("keep").form;
  const fields = [...new FormData(form)].filter(([, value]) => value);
  const shown = fields.filter(([field, value]) => field !== "topic" && !(field === "state" && value === "waiting"));
  const guess = [form.elements.topic.selectedOptions[0].textContent, ...shown.map(([, value]) => value)].join(" ");
  const name = prompt("Name of the search", guess);
  if (name) write([...read().filter(([other]) => other !== name), [name, String(new URLSearchParams(fields))]]);
});
showSearches();
