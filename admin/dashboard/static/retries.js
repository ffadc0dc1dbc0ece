"use strict";
// Re-drive the dead letters that match, after a dry run has said how many and which.
const redrive = $("redrive");
const SHOWN = 5;
let asked = null;
async function post(content, key) {
  const topic = redrive.dataset.topic.replace("://", "/").split("/").map(encodeURIComponent).join("/");
  const headers = { "Content-Type": "application/json", Accept: "application/json", ...(key ? { "Idempotency-Key": key } : {}) };
  return ask(`/admin/v2/${topic}/dlq/redrive`, { method: "POST", headers, body: JSON.stringify(content) });
}
function filterOf() {
  const filter = {};
  for (const [name, value] of new FormData(redrive)) if (value.trim()) filter[name] = value.trim();
  if (filter.messageIds) filter.messageIds = filter.messageIds.split(/[\s,]+/).filter(Boolean);
  return filter;
}
redrive?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const filter = filterOf(), answer = $("answer");
  answer.textContent = "counting what matches …";
  try {
    const { ok, found } = await post({ filter, dryRun: true });
    answer.textContent = !ok ? found.reason : found.matched ? "" : "No dead letter matches.";
    if (!ok || !found.matched) return;
    // A call that was broken off is made again under the same key, and sends nothing twice.
    const key = JSON.stringify(filter) === JSON.stringify(asked?.filter) && !asked.isDone ? asked.key : [...crypto.getRandomValues(new Uint32Array(4))].join("-");
    asked = { filter, key, isDone: false };
    $("confirm-title").textContent = `Re-drive ${count(found.matched)} dead letter${found.matched === 1 ? "" : "s"}?`;
    $("confirm-text").textContent = `They are delivered once more, for ${filter.subscription}. This can't be undone.`;
    $("confirm-list").replaceChildren(...found.messages.slice(0, SHOWN).map((m) => {
      const item = document.createElement("li");
      item.textContent = [m.messageId, m.key, (m.reasons || []).at(-1)].filter(Boolean).join(" · ");
      return item;
    }));
    $("confirm").showModal();
  } catch { answer.textContent = "no answer from the API: is it running?"; }
});
$("confirm-yes")?.addEventListener("click", async () => {
  const answer = $("answer");
  $("confirm").close();
  answer.textContent = "sending them back …";
  try {
    const { ok, found } = await post({ filter: asked.filter, max: 1000000 }, asked.key);
    asked.isDone = ok;
    const counts = Object.entries(found).filter(([name, n]) => typeof n === "number" && n && name !== "matched");
    const words = { redriven: "re-driven", alreadyRedriven: "re-driven before", refused: "refused", unreadable: "unreadable" };
    answer.textContent = ok ? counts.map(([name, n]) => `${count(n)} ${words[name] || name}`).join(", ") || "nothing to do" : found.reason;
  } catch { answer.textContent = "no answer from the API: is it running? Asked again, nothing is sent twice."; }
});
