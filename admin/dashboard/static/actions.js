"use strict";
// Cancel, skip, reschedule, deliver now and restore: of the messages that are selected, or all that match. Retry: of one.
const actions = $("actions");
const WORDS = {
  cancel: ["Cancel", "They will not be delivered. Until their time comes this can be undone (Restore). A message is cancelled with its whole entry."],
  skip: ["Skip", "They will not be delivered to these subscriptions. Until their time comes this can be undone (Restore)."],
  reschedule: ["Reschedule", "They are delivered at the time below instead, and keep their ids."],
  deliverNow: ["Deliver now", "They are delivered at once. This can't be undone."],
  retry: ["Retry", "It is delivered once more, to this subscription alone: after the wait that its backoff says, and at once to its dead letters where it has had all its attempts."],
  restore: ["Restore", "Cancels and skips of them are undone: they are delivered at their time."],
};
const namesOf = (action) => (action === "retry" ? [$("retry-for").value] : JSON.parse(actions.dataset.names));
// A message may have a row, and a box, for each time at which it is due for some of its subscriptions.
function distinct() { return new Set(picked().map((box) => box.value)).size; }
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
    if (!namesOf(action).includes(name)) continue;
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
    else if (action === "retry") calls.push([`${path}/retry`, { messageIds: ids, reason: $("why").value.trim() }]);
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
    $("answer").textContent = "";
    const [title, text] = WORDS[action];
    let n = distinct();
    let who = `for ${namesOf(action).join(", ")}`;
    if (isAll()) {
      $("answer").textContent = "counting what matches …";
      const answers = [];
      for (const [path, content] of callsOfAll(action, 0, true)) answers.push(await post(path, content));
      const failed = answers.find((a) => !a.ok);
      $("answer").textContent = failed ? failed.found.reason : "";
      if (failed) return;
      n = Math.max(...answers.map((a) => a.found.matched));
      who = JSON.parse(actions.dataset.names).map((name, i) => `${count(answers[i].found.matched)} for ${name}`).join(", ");
    }
    if (!n) { $("answer").textContent = isAll() ? "Nothing matches." : "Select some messages first."; return; }
    $("confirm-title").textContent = `${title} ${count(n)} message${n === 1 ? "" : "s"}?`;
    $("confirm-text").textContent = `${text} (${who})`;
    $("confirm-time").hidden = action !== "reschedule";
    $("confirm-why").hidden = action !== "retry";
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
    $("answer").textContent = "waiting for the job …";
    dialog.close();
    try { $("answer").textContent = `${WORDS[action][0]}: ${await run(isAll() ? callsOfAll(action, time, false) : callsOfSelected(action, time))}`; }
    catch { $("answer").textContent = "no answer from the API: is it running?"; }
    $("confirm-yes").disabled = false;
  });
}
