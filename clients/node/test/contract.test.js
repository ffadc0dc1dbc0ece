import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import * as delaylake from "delaylake-client";

const { DELAYLAKE_URL: url, DELAYLAKE_TOPIC: topic = "", DELAYLAKE_TOKEN: token = "" } = process.env;
const timeoutMillis = 150_000;

/** @typedef {Record<string, any>} Step clients/contract.json has them */

test("the steps that all clients pass", { skip: url ? false : "DELAYLAKE_URL names no service" }, async () => {
  const steps = JSON.parse(await readFile(new URL("../../contract.json", import.meta.url), "utf8"));
  /** @type {Map<string, delaylake.MessageId>} */
  const messages = new Map();
  for (const step of steps) {
    const told = await settled(step, messages);
    const wanted = { error: step.error, ...(step.outcomes && { outcomes: step.outcomes }) };
    assert.deepEqual({ error: told.error, ...(step.outcomes && { outcomes: told.outcomes }) }, wanted, `${step.title}: ${told.text}`);
    if (step.as && told.id) messages.set(step.as, told.id);
    for (const [name, n] of Object.entries(step.redriven ?? {})) assert.equal(told.redriven?.[name], n, step.title);
    if (step.sameAs) assert.equal(String(told.id), String(messages.get(step.sameAs)), step.title);
  }
});

/**
 * What a step is answered; until what it waits for is listed.
 *
 * @param {Step} step
 * @param {Map<string, delaylake.MessageId>} messages
 * @returns {Promise<{ id?: delaylake.MessageId, redriven?: any, outcomes?: Record<string, string>, error?: string, text?: string }>}
 */
async function settled(step, messages) {
  const deadline = Date.now() + timeoutMillis;
  for (;;) {
    try {
      const found = await done(step, messages);
      const wanted = waitedFor(step, messages);
      if (wanted !== undefined) {
        const summary = JSON.stringify(summaryOf(step, found));
        if (summary === JSON.stringify(wanted)) return { redriven: found };
        assert(Date.now() < deadline, `${step.title}: ${summary}, not ${JSON.stringify(wanted)}`);
      } else if (step.redriven) {
        return { redriven: found };
      } else {
        return found instanceof delaylake.MessageId ? { id: found } : { outcomes: results(found) };
      }
    } catch (error) {
      if (!(error instanceof delaylake.DelayLakeError)) throw error;
      const isSeen = !(step.until === "seen" && error instanceof delaylake.NotFound && Date.now() < deadline);
      if (isSeen) return { error: error.name, outcomes: results(error.outcomes), text: error.message };
    }
    await sleep(200);
  }
}

/**
 * What a step's answer is to be before it goes on, as a summary; undefined: any.
 *
 * @param {Step} step
 * @param {Map<string, delaylake.MessageId>} messages
 */
function waitedFor(step, messages) {
  if (step.waitingFor) return [step.waitingFor, step.cancelledFor];
  if (step.dryRun) return step.redriven.matched;
  const end = step.expiresAt ?? step.expiresAfterMillis ?? null;
  return step.listed?.map((/** @type {string} */ name) => [String(messages.get(name)), end]);
}

/**
 * @param {Step} step
 * @param {any} found
 */
function summaryOf(step, found) {
  if (step.waitingFor) return [[...found.waitingFor].sort(), [...found.cancelledFor].sort()];
  if (step.dryRun) return found.matched;
  return found.map((/** @type {any} */ one) => {
    if (step.expiresAt) return [String(one.id), Number(one.expiresAt)];
    return [String(one.id), step.expiresAfterMillis ? one.expiresAt - one.deliverAt : null];
  });
}

/** @param {readonly any[]} outcomes */
function results(outcomes) {
  return Object.fromEntries(outcomes.map((one) => [one.subscription, one.result]));
}

/**
 * @param {Step} step
 * @param {Map<string, delaylake.MessageId>} messages
 * @returns {Promise<any>}
 */
async function done(step, messages) {
  const lake = new delaylake.Client(url ?? "", { token: step.token ?? token, timeoutMillis });
  const where = topic + (step.topic ? `_${step.topic}` : "");
  const message = step.scheduleKey ? { scheduleKey: step.scheduleKey } : messages.get(step.message) ?? step.message;
  const { subscription, key, properties, limit, scheduleKey, repeat, timeZone } = step;
  const requestId = step.requestId && `node-${step.requestId}`;
  const given = defined({ subscription, requestId });
  const listing = defined({ subscription, key, properties, limit });
  switch (step.do) {
    case "schedule": {
      const ends = { expireAfter: step.expireAfterMillis, expireAt: step.expireAt };
      const how = { after: step.afterMillis, requestId, key, properties, scheduleKey, repeat, timeZone, ...ends };
      return lake.schedule(where, step.payload, defined(how));
    }
    case "cancel":
      return lake.cancel(where, message, { ...given, ...(step.dueInMillis && { deliverAt: Date.now() + step.dueInMillis }) });
    case "skip":
      return lake.skip(where, message, given);
    case "reschedule":
      return lake.reschedule(where, message, { ...given, after: step.afterMillis });
    case "postpone":
      return lake.postpone(where, message, { ...given, by: step.byMillis });
    case "deliverNow":
      return lake.deliverNow(where, message, given);
    case "restore":
      return lake.restore(where, message, given);
    case "retry":
      return lake.retry(where, message, { ...given, subscription, reason: step.reason });
    case "endSchedule":
      return lake.endSchedule(where, message, given);
    case "skipNext":
      return lake.skipNext(where, message, given);
    case "pauseSchedule":
      return lake.pauseSchedule(where, message, given);
    case "resumeSchedule":
      return lake.resumeSchedule(where, message, given);
    case "pause":
      return lake.pause(where, { ...given, subscription });
    case "resume":
      return lake.resume(where, { ...given, subscription });
    case "get":
      return lake.get(where, message);
    case "redrive": {
      const ids = step.messages?.map((/** @type {string} */ name) => messages.get(name));
      const wanted = defined({ key, reason: step.reason, messages: ids, dryRun: step.dryRun });
      return lake.redrive(where, { ...wanted, subscription });
    }
    case "pending":
      return collected(lake.pending(where, listing));
    case "schedules":
      return collected(lake.schedules(where, listing));
    default:
      throw new Error(`no step ${step.do}`);
  }
}

/** @param {Record<string, any>} options */
function defined(options) {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
}

/** @param {AsyncIterable<unknown>} listed */
async function collected(listed) {
  const found = [];
  for await (const one of listed) found.push(one);
  return found;
}
