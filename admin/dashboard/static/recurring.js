"use strict";
// Skip the next occurrence of a recurring message, pause and resume it, or end it.
const schedules = $("schedules");
const CALLS = {
  skipNext: ["Skip the next occurrence of", "It will not be delivered. This can't be undone.", "POST", "/skipNext"],
  pause: ["Pause", "No further occurrence is delivered until it is resumed.", "POST", "/pause"],
  resume: ["Resume", "It goes on by its rule; what was missed is made up for as its misfire says.", "POST", "/resume"],
  end: ["End", "No further occurrence is delivered. Until the next one would be due this can be undone (Restore, on the message's page).", "DELETE", ""],
};
let chosen = null;
schedules?.addEventListener("click", (event) => {
  const button = event.target.closest("[data-action]");
  if (!button) return;
  chosen = button.dataset;
  const [title, text] = CALLS[chosen.action], name = schedules.dataset.subscription;
  $("confirm-title").textContent = `${title} ${chosen.id}?`;
  $("confirm-text").textContent = `${text} (${name ? `for ${name}` : "for all subscriptions"})`;
  $("confirm").showModal();
});
$("confirm-yes")?.addEventListener("click", async () => {
  const [, , method, last] = CALLS[chosen.action], name = schedules.dataset.subscription;
  const topic = schedules.dataset.topic.replace("://", "/").split("/").map(encodeURIComponent).join("/");
  const query = name ? `?subscriptionNames=${encodeURIComponent(name)}` : "";
  $("confirm").close();
  $("answer").textContent = "waiting for the job …";
  try {
    const headers = { Accept: "application/json", Prefer: "return=representation" };
    const { found } = await ask(`/admin/v2/${topic}/schedules/${chosen.id}${last}${query}`, { method, headers });
    const outcomes = (found.outcomes || []).map((o) => `${o.subscription}: ${o.result}`);
    $("answer").textContent = `${chosen.id} · ${outcomes.join(", ") || found.reason}`;
  } catch { $("answer").textContent = "no answer from the API: is it running?"; }
});
