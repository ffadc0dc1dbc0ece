import { randomUUID } from "node:crypto";
import { types } from "node:util";

import { Attempts } from "./attempts.js";
import { DelayLakeError, gravestError, Invalid, NoAnswer, NotFound, statusError, Unavailable } from "./errors.js";
import { MessageId, type MessageState, type Outcome, type PendingMessage, type Redriven, type Schedule } from "./messages.js";
import type { components } from "./openapi.js";
import { type Duration, durationMillis, millis, moment, shiftMillis, type Time } from "./times.js";

type Api = components["schemas"];

const TIMEOUT_MILLIS = 30_000;
const LONGEST_TIMEOUT_MILLIS = 2 ** 31 - 1; // beyond it a timer ends at once
const PAGE = 1_000; // messages or schedules in a page: the API's maximum
const DONE = new Set(["APPLIED", "ALREADY_APPLIED"]);
const STATES = { waiting: "waiting", held: "held", cancelled: "takenBack" } as const; // as the API calls them
const PROXY_STATUSES = new Set([401, 403, 413, 429, 502, 503, 504]); // a proxy may answer them, without a reason
const WHOSE = "is it delaylake's admin API?";

/** A text is sent as UTF-8, bytes as they are, any other value as JSON. */
export type Payload = string | Uint8Array | number | boolean | object;

/** The message that waits under a schedule key. */
export interface Key {
  readonly scheduleKey: string;
}

/** A message by its id, or by its schedule key. */
export type Named = MessageId | string | Key;

export interface ClientOptions {
  /** Pulsar token; a function is called for it each time. */
  token?: string | (() => string | Promise<string>);
  /** Time for a call with all its repetitions, ms; 30,000 by default. */
  timeoutMillis?: number;
  /** A fetch of your own, with proxies or certificates. */
  fetch?: typeof fetch;
}

export interface ScheduleOptions {
  /** When; a past time means at once. For a message that recurs the time of the first occurrence. */
  at?: Time;
  /** The delay, instead of `at`. */
  after?: Duration;
  key?: string;
  orderingKey?: string;
  properties?: Record<string, string>;
  eventTime?: Time;
  /** Type of the topic's newest schema, which the message then has, as `JSON`; the payload is sent as it is given. */
  schema?: string;
  /** Of all messages of a topic with the same schedule key only one waits. */
  scheduleKey?: string;
  scheduleMode?: "replace" | "keep" | "debounce";
  debounceMax?: Duration;
  /** What can't be sent by then is not sent. */
  expireAt?: Time;
  /** How long after it is due; with both the earlier end counts. */
  expireAfter?: Duration;
  /** The rule of a message that recurs: cron, `@every 90s` or an RRULE. */
  repeat?: string;
  timeZone?: string;
  repeatUntil?: Time;
  repeatTimes?: number;
  misfire?: "once" | "all" | "skip";
  /** Of a topic's messages with the same id the first is delivered. Without it each call has one of its own. */
  requestId?: string;
}

export interface CommandOptions {
  /** One subscription; without it all that the topic has or gets later. */
  subscription?: string;
  /** A command is applied once under it, however often it is sent. */
  requestId?: string;
}

export interface ListOptions {
  subscription?: string;
  limit?: number;
}

export interface PendingOptions extends ListOptions {
  key?: string;
  dueFrom?: Time;
  dueBefore?: Time;
  /** Only messages with all of these properties. */
  properties?: Record<string, string>;
  state?: keyof typeof STATES;
}

export interface RedriveOptions {
  subscription: string;
  key?: string;
  /** Only dead letters with all of these properties. */
  properties?: Record<string, string>;
  /** Only these, by their property `delaylake.messageId`. */
  messages?: readonly (MessageId | string)[];
  /** Only those with this text in a reason of their retries. */
  reason?: string;
  /** Only those that became dead letters from then on, or before. */
  publishedFrom?: Time;
  publishedBefore?: Time;
  /** Whether to count the matching dead letters only. */
  dryRun?: boolean;
  /** If more match, nothing is done; 10,000 by default. */
  limit?: number;
  /** That of a call that was broken off: what it has sent back is not sent again. */
  requestId?: string;
}

interface Call {
  method: string;
  path: string;
  query?: URLSearchParams;
  body?: unknown; // JSON is made of it once: it may change before the call is repeated
  headers?: Record<string, string>;
  requestId?: string;
}

interface Answer {
  status: number;
  content: Record<string, unknown>;
  reason: string;
  url: string;
}

/**
 * Schedules messages, and changes and lists those that wait, over the admin API.
 *
 * A command answers with an outcome for each subscription. If it fails for some, it is rejected with the error of the
 * gravest outcome; for the others it is done. A call whose connection fails is repeated until its time is over. To repeat
 * it after that, or in another process, give it the `requestId` that you chose, or that of the error.
 */
export class Client {
  readonly #url: string;
  readonly #options: ClientOptions;

  /** @param url the admin API's URL, as http://127.0.0.1:8081 */
  constructor(url: string, options: ClientOptions = {}) {
    if (!/^https?:\/\/./.test(url) || !URL.canParse(url)) {
      throw new TypeError(`url is none of an admin API, as http://127.0.0.1:8081: ${url}`);
    }
    if (new URL(url).username) throw new TypeError("url has a user, which fetch refuses: give a token");
    const { timeoutMillis = TIMEOUT_MILLIS } = options;
    if (!(timeoutMillis > 0 && timeoutMillis <= LONGEST_TIMEOUT_MILLIS)) {
      throw new RangeError(`timeoutMillis must be above 0 and at most ${LONGEST_TIMEOUT_MILLIS}: ${timeoutMillis}`);
    }
    this.#url = url.replace(/\/+$/, "");
    this.#options = options;
  }

  /** Sends a message that is delivered later, or with `repeat` again and again; resolves to its id and time. */
  async schedule(topic: string, payload: Payload, options: ScheduleOptions = {}): Promise<MessageId> {
    const { at, after, eventTime, debounceMax, repeatUntil, expireAt, expireAfter, requestId = randomUUID(), ...rest } = options;
    if (at !== undefined && after !== undefined) throw new TypeError("one of at and after is needed, not both");
    if (at === undefined && after === undefined && rest.repeat === undefined) throw new TypeError("one of at and after is needed");
    const body: Api["ScheduleRequest"] = {
      ...payloadField(payload),
      ...rest,
      ...(at !== undefined && { deliverAt: millis("at", at) }),
      ...(after !== undefined && { deliverAfter: durationMillis("after", after) }),
      ...(eventTime !== undefined && { eventTime: millis("eventTime", eventTime) }),
      ...(debounceMax !== undefined && { debounceMax: durationMillis("debounceMax", debounceMax) }),
      ...(expireAt !== undefined && { expireAt: millis("expireAt", expireAt) }),
      ...(expireAfter !== undefined && { expireAfter: durationMillis("expireAfter", expireAfter) }),
      ...(repeatUntil !== undefined && { repeatUntil: millis("repeatUntil", repeatUntil) }),
    };
    const headers = { "Idempotency-Key": requestId };
    const answer = await this.#send({ method: "POST", path: `${topicPath(topic)}/delayed`, body, headers, requestId });
    const made = contentOf<Api["ScheduledAnswer"]>(answer, "messageId", requestId);
    return MessageId.parse(made.messageId, moment(made.deliverAt));
  }

  /**
   * Cancels a message, on subscriptions of any type. By its id it may come before its message, and needs `deliverAt`
   * where the id does not have it.
   */
  async cancel(topic: string, message: Named, options: CommandOptions & { deliverAt?: Time } = {}): Promise<Outcome[]> {
    const { deliverAt, ...more } = options;
    if (isKey(message)) return this.#post(topic, "cancelDelayedMessage", message, more, { scheduleKey: message.scheduleKey });
    const id = MessageId.of(message);
    if (id.batchIndex >= 0) throw new TypeError(`a cancel is of all messages of a batch: skip ${id}`);
    const due = deliverAt ?? id.deliverAt;
    if (due === undefined) throw new TypeError("a cancel needs deliverAt, which the id from schedule() has: or skip");
    const body = { ledgerId: id.ledgerId, entryId: id.entryId, deliverAt: millis("deliverAt", due) };
    return this.#post(topic, "cancelDelayedMessage", id, more, body);
  }

  /** Cancels a message, also a single one of a batch, without its time; not on Exclusive and Failover subscriptions. */
  async skip(topic: string, message: Named, options: CommandOptions = {}): Promise<Outcome[]> {
    return this.#command(topic, "skipByMessageIds", message, options);
  }

  /** Moves a message that waits to an earlier or later time. */
  async reschedule(
    topic: string,
    message: Named,
    options: CommandOptions & ({ at: Time; after?: never } | { after: Duration; at?: never }),
  ): Promise<Outcome[]> {
    const { at, after, ...more } = options;
    if ((at === undefined) === (after === undefined)) throw new TypeError("one of at and after is needed");
    if (after !== undefined && more.requestId !== undefined) {
      throw new TypeError("with a requestId, give the time as at (an error has it): after is another time each time");
    }
    const deliverAt = at === undefined ? Date.now() + durationMillis("after", after!) : millis("at", at);
    return this.#command(topic, "reschedule", message, more, { deliverAt }, new Date(deliverAt));
  }

  /** Moves a message that waits so much later than it would be delivered; negative: sooner, but not before now. */
  async postpone(topic: string, message: Named, options: CommandOptions & { by: Duration }): Promise<Outcome[]> {
    const { by, ...more } = options;
    return this.#command(topic, "postpone", message, more, { byMillis: shiftMillis("by", by) });
  }

  /** Delivers a message that waits at once. */
  async deliverNow(topic: string, message: Named, options: CommandOptions = {}): Promise<Outcome[]> {
    return this.#command(topic, "deliverNow", message, options);
  }

  /** Undoes a cancel or skip of a message whose time has not come. */
  async restore(topic: string, message: MessageId | string, options: CommandOptions = {}): Promise<Outcome[]> {
    return this.#command(topic, "restore", message, options);
  }

  /**
   * Delivers a message once more to a subscription whose consumer failed on it.
   *
   * @param topic the delivered message's property `delaylake.source`
   * @param message the delivered message's property `delaylake.messageId`
   * @param options `requestId`: one for each message and attempt, and a consumer that asks twice gets one retry
   */
  async retry(
    topic: string,
    message: MessageId | string,
    options: CommandOptions & { subscription: string; reason?: string; after?: Duration },
  ): Promise<Outcome[]> {
    const { reason = "", after, ...more } = options;
    const afterMillis = after === undefined ? 0 : durationMillis("after", after);
    return this.#command(topic, "retry", message, more, { reason, afterMillis });
  }

  /** Parks what comes due for a subscription, until it is resumed, or rescheduled. */
  async pause(topic: string, options: CommandOptions & { subscription: string }): Promise<Outcome[]> {
    return this.#subscriptionCommand(topic, "pause", options);
  }

  /** Ends the pause of a subscription: what came due meanwhile is delivered now. */
  async resume(topic: string, options: CommandOptions & { subscription: string }): Promise<Outcome[]> {
    return this.#subscriptionCommand(topic, "resume", options);
  }

  /** Skips the next occurrence of a message that recurs. */
  async skipNext(topic: string, message: Named, options: CommandOptions = {}): Promise<Outcome[]> {
    return this.#scheduleCommand("POST", topic, "/skipNext", message, options);
  }

  /** Pauses a schedule: the next occurrence waits until the schedule is resumed. */
  async pauseSchedule(topic: string, message: Named, options: CommandOptions = {}): Promise<Outcome[]> {
    return this.#scheduleCommand("POST", topic, "/pause", message, options);
  }

  /** Resumes a paused schedule. For occurrences that were missed meanwhile see its `misfire`. */
  async resumeSchedule(topic: string, message: Named, options: CommandOptions = {}): Promise<Outcome[]> {
    return this.#scheduleCommand("POST", topic, "/resume", message, options);
  }

  /** Ends a schedule: no further occurrence of the message that recurs is delivered. */
  async endSchedule(topic: string, message: MessageId | string, options: CommandOptions = {}): Promise<Outcome[]> {
    return this.#scheduleCommand("DELETE", topic, "", message, options);
  }

  /** Delivers the matching dead letters of a subscription once more, or with `dryRun` counts them. */
  async redrive(topic: string, options: RedriveOptions): Promise<Redriven> {
    const { messages, publishedFrom, publishedBefore, dryRun = false, limit, requestId = randomUUID(), ...rest } = options;
    const filter: Api["DeadLetterFilter"] = {
      ...rest,
      ...(messages && { messageIds: messages.map((one) => letterId(MessageId.of(one))) }),
      ...(publishedFrom !== undefined && { publishedFrom: millis("publishedFrom", publishedFrom) }),
      ...(publishedBefore !== undefined && { publishedBefore: millis("publishedBefore", publishedBefore) }),
    };
    const body: Api["RedriveRequest"] = { filter, dryRun, ...(limit !== undefined && { max: limit }) };
    const path = `${topicPath(topic)}/dlq/redrive`;
    const answer = await this.#send({ method: "POST", path, body, headers: { "Idempotency-Key": requestId }, requestId });
    const { matched, redriven = 0, alreadyRedriven = 0, refused = 0, unreadable = 0 } = contentOf<
      Partial<Redriven> & { matched: number }
    >(answer, "matched", requestId);
    return { matched, redriven, alreadyRedriven, refused, unreadable };
  }

  /**
   * Returns for which subscriptions a message waits, and for which it was cancelled; a few seconds behind. It is
   * rejected with NotFound where the message is delivered, came within the last seconds, or never existed.
   */
  async get(topic: string, message: MessageId | string): Promise<MessageState> {
    const id = MessageId.of(message);
    const listed = async (state: string): Promise<PendingMessage[]> => {
      const query = new URLSearchParams({ state, dueFrom: "0", ledgerId: id.ledgerId, entryId: id.entryId });
      const found = [];
      for await (const one of this.#pendingMessages(topicPath(topic), query, undefined)) {
        if (id.batchIndex < 0 || one.id.batchIndex === id.batchIndex) found.push(one);
      }
      return found;
    };
    const waiting = await listed(STATES.waiting);
    const cancelled = await listed(STATES.cancelled);
    const [first] = [...waiting, ...cancelled];
    if (first === undefined) throw new NotFound(`${id} does not wait, or has only just come`);
    if ([...waiting, ...cancelled].some((one) => String(one.id) !== String(first.id))) {
      throw new Invalid(`${id} is a batch of several messages: name one by its batch index`);
    }
    // A message is listed once for each time at which it is due.
    const names = (messages: PendingMessage[]) => [...new Set(messages.flatMap((one) => one.subscriptions))];
    return { message: first, waitingFor: names(waiting), cancelledFor: names(cancelled) };
  }

  /** Goes through what waits, soonest first, a few seconds behind. */
  async *pending(topic: string, options: PendingOptions = {}): AsyncGenerator<PendingMessage, void, undefined> {
    const query = new URLSearchParams({ state: STATES[options.state ?? "waiting"] });
    if (options.subscription !== undefined) query.set("subscription", options.subscription);
    if (options.key !== undefined) query.set("key", options.key);
    if (options.dueFrom !== undefined) query.set("dueFrom", String(millis("dueFrom", options.dueFrom)));
    if (options.dueBefore !== undefined) query.set("dueBefore", String(millis("dueBefore", options.dueBefore)));
    for (const [name, value] of Object.entries(options.properties ?? {})) query.append("property", `${name}=${value}`);
    yield* this.#pendingMessages(topicPath(topic), query, options.limit);
  }

  /** Goes through the messages that recur, in the order in which they came. */
  async *schedules(
    topic: string,
    options: ListOptions & { withEnded?: boolean } = {},
  ): AsyncGenerator<Schedule, void, undefined> {
    const query = new URLSearchParams(options.withEnded ? { withEnded: "true" } : {});
    if (options.subscription !== undefined) query.set("subscription", options.subscription);
    const pages = this.#pages<Api["SchedulePage"]>(`${topicPath(topic)}/schedules`, query, "schedules", options.limit);
    for await (const page of pages) {
      for (const one of page.schedules) {
        const nextDeliverAt = moment(one.nextDeliverAt);
        yield {
          ...one,
          id: MessageId.parse(one.id, nextDeliverAt ?? undefined),
          state: stateOf(one.state),
          repeatUntil: moment(one.repeatUntil),
          firstDeliverAt: moment(one.firstDeliverAt),
          publishTime: moment(one.publishTime),
          nextDeliverAt,
          subscriptions: one.subscriptions.map((part) => ({
            ...part,
            state: stateOf(part.state),
            nextDeliverAt: moment(part.nextDeliverAt),
          })),
        };
      }
    }
  }

  async *#pendingMessages(
    path: string,
    query: URLSearchParams,
    limit: number | undefined,
  ): AsyncGenerator<PendingMessage, void, undefined> {
    for await (const page of this.#pages<Api["PendingPage"]>(`${path}/delayed`, query, "messages", limit)) {
      for (const one of page.messages) {
        const deliverAt = moment(one.deliverAt);
        yield {
          id: MessageId.parse(one.messageId, deliverAt ?? undefined),
          deliverAt,
          subscriptions: one.subscriptions,
          key: one.key,
          orderingKey: one.orderingKey,
          properties: one.properties,
          eventTime: one.eventTime ? moment(one.eventTime) : null,
          publishTime: moment(one.publishTime),
          producerName: one.producerName,
          expiresAt: moment(one.expiresAt ?? null),
        };
      }
    }
  }

  /** Sends a command for all that a subscription gets. */
  #subscriptionCommand(
    topic: string,
    operation: string,
    { subscription, requestId = randomUUID() }: CommandOptions & { subscription: string },
  ): Promise<Outcome[]> {
    if (!subscription) throw new TypeError(`a ${operation} names its subscription`);
    const path = `${topicPath(topic)}/subscription/${encodeURIComponent(subscription)}/${operation}`;
    return this.#outcomes({ method: "POST", path, requestId }, undefined);
  }

  /** Sends a command about a message that recurs; without a subscription it is for all that the topic has. */
  #scheduleCommand(
    method: string,
    topic: string,
    last: string,
    message: Named,
    { subscription, requestId = randomUUID() }: CommandOptions,
  ): Promise<Outcome[]> {
    const id = isKey(message) ? undefined : MessageId.of(message);
    const query = new URLSearchParams(isKey(message) ? { scheduleKey: message.scheduleKey } : {});
    if (subscription !== undefined) query.set("subscriptionNames", subscription);
    const path = `${topicPath(topic, id)}/schedules${id === undefined ? "" : `/${idInTopic(id)}`}${last}`;
    return this.#outcomes({ method, path, query, requestId }, id);
  }

  /** Sends a command whose path names one subscription, or with `*` all. */
  #command(
    topic: string,
    operation: string,
    message: Named,
    { subscription = "*", requestId = randomUUID() }: CommandOptions,
    fields: Record<string, unknown> = {},
    deliverAt?: Date,
  ): Promise<Outcome[]> {
    const id = isKey(message) ? undefined : MessageId.of(message);
    const path = `${topicPath(topic, id)}/subscription/${encodeURIComponent(subscription)}/${operation}`;
    const named = isKey(message) ? { scheduleKeys: [message.scheduleKey] } : { messageIds: [idInTopic(id!)] };
    // Ids alone are a list of texts: beside nothing else in an object they would be base64.
    const body = Object.keys(fields).length === 0 && id ? named.messageIds : { ...named, ...fields };
    return this.#outcomes({ method: "POST", path, body, requestId }, id, deliverAt);
  }

  /** Sends a command that names its subscriptions in the body. */
  #post(
    topic: string,
    operation: string,
    message: Named,
    { subscription = "*", requestId = randomUUID() }: CommandOptions,
    fields: Record<string, unknown>,
  ): Promise<Outcome[]> {
    const id = isKey(message) ? undefined : MessageId.of(message);
    const body = { ...fields, subscriptionNames: [subscription] };
    return this.#outcomes({ method: "POST", path: `${topicPath(topic, id)}/${operation}`, body, requestId }, id);
  }

  async #outcomes(call: Call & { requestId: string }, id: MessageId | undefined, deliverAt?: Date): Promise<Outcome[]> {
    const headers = { Prefer: "return=representation", "Idempotency-Key": call.requestId };
    try {
      const answer = await this.#send({ ...call, headers });
      // A cancel by id that comes before its message waits for it, and that is enough.
      const waits = id !== undefined && (call.method === "DELETE" || call.path.endsWith("/cancelDelayedMessage"));
      const told = (answer.content as Partial<Api["_Outcomes"]>).outcomes ?? [];
      const outcomes = told.map((one) => ({
        subscription: one.subscription,
        message:
          one.ledgerId < 0 && id
            ? String(id)
            : `${one.ledgerId}:${one.entryId}:${id?.partition ?? -1}:${one.batchIndex}`,
        result: one.result,
        reason: one.reason,
        isDone: DONE.has(one.result) || (waits && one.result === "WAITING"),
      }));
      if (outcomes.some((one) => !one.isDone)) throw gravestError(outcomes, call.requestId, deliverAt);
      contentOf(answer, "outcomes", call.requestId);
      return outcomes;
    } catch (error) {
      if (!(error instanceof DelayLakeError) || error.deliverAt || !deliverAt) throw error;
      const kind = error.constructor as typeof DelayLakeError;
      throw new kind(error.message, { outcomes: error.outcomes, requestId: error.requestId, deliverAt, cause: error.cause });
    }
  }

  async *#pages<Page extends { nextCursor: string | null }>(
    path: string,
    query: URLSearchParams,
    name: string & keyof Page,
    limit: number | undefined,
  ): AsyncGenerator<Page, void, undefined> {
    if (limit !== undefined && !(Number.isInteger(limit) && limit > 0)) throw new RangeError(`limit must be 1 or more: ${limit}`);
    let left = limit ?? Infinity;
    while (left > 0) {
      query.set("limit", String(Math.min(left, PAGE)));
      const page = contentOf<Page>(await this.#send({ method: "GET", path, query }), name);
      yield page;
      left -= (page[name] as readonly unknown[]).length;
      if (page.nextCursor === null) return;
      query.set("cursor", page.nextCursor);
    }
  }

  /** Makes a call, and repeats it until it is answered or its time is over. */
  async #send(call: Call): Promise<Answer> {
    const attempts = new Attempts(call.requestId ?? "", this.#options.timeoutMillis ?? TIMEOUT_MILLIS);
    const url = this.#url + call.path;
    const body = call.body === undefined ? {} : { body: JSON.stringify(call.body) };
    for (;;) {
      const headers = await this.#headers(call);
      const init = { method: call.method, headers, ...body, signal: AbortSignal.timeout(attempts.millisLeft) };
      let retryAfterMillis = 0;
      let failure: unknown;
      try {
        const response = await (this.#options.fetch ?? fetch)(call.query?.size ? `${url}?${call.query}` : url, init);
        const answer = answerOf(response, await response.text(), url);
        const kind = statusError(answer.status);
        if (!(kind === Unavailable || kind === NoAnswer)) return answer;
        failure = new kind(answer.reason);
        const asked = response.headers.get("Retry-After") ?? "";
        if (/^\d+$/.test(asked)) retryAfterMillis = 1_000 * Number(asked);
      } catch (error) {
        failure = error;
      }
      await attempts.pauseAfter(failure, retryAfterMillis);
    }
  }

  /** Returns a call's headers with the token; throws a TypeError for what fetch would refuse. */
  async #headers(call: Call): Promise<Record<string, string>> {
    const { token } = this.#options;
    const given = typeof token === "function" ? await token() : token;
    const headers = {
      ...call.headers,
      ...(call.body !== undefined && { "Content-Type": "application/json" }),
      ...(given !== undefined && { Authorization: `Bearer ${given.trim()}` }),
    };
    new Headers(headers);
    return headers;
  }
}

/** Returns the field of a call that has a payload. */
function payloadField(payload: Payload): { payload: unknown } | { payloadBase64: string } {
  if (types.isUint8Array(payload)) return { payloadBase64: Buffer.from(payload).toString("base64") };
  if (types.isAnyArrayBuffer(payload) || ArrayBuffer.isView(payload)) throw new TypeError("payload: give bytes as a Uint8Array");
  const isObject = typeof payload === "object" && payload !== null;
  if (!isObject && [undefined, "null"].includes(JSON.stringify(payload))) {
    throw new TypeError(`payload is nothing that JSON has: ${String(payload)}`);
  }
  return { payload };
}

function answerOf(response: Response, text: string, url: string): Answer {
  const content = parse(text);
  const reason = typeof content["reason"] === "string" && content["reason"] ? content["reason"] : "";
  return { status: response.status, content, reason: reason || `${response.status} ${response.statusText}`.trim(), url };
}

/** Reads an object of JSON. Numbers of ids that are beyond what a number is exact for become texts. */
function parse(text: string): Record<string, unknown> {
  try {
    const found: unknown = JSON.parse(text.replace(/"(ledgerId|entryId)":\s*(\d{16,})/g, '"$1":"$2"'));
    return found instanceof Object && !Array.isArray(found) ? (found as Record<string, unknown>) : {};
  } catch {
    return {};
  }
}

/** Returns an answer's JSON, or throws the error that it is. `name`: a field that each such answer of the API has. */
function contentOf<Content>(answer: Answer, name: string, requestId = ""): Content {
  const { status, content, reason, url } = answer;
  if (status >= 200 && status < 300) {
    if (name in content) return content as Content;
    throw new DelayLakeError(`${url} answers ${status} without '${name}': ${WHOSE}`, { requestId });
  }
  if (reason.startsWith("no such path") || (!("reason" in content) && !PROXY_STATUSES.has(status))) {
    throw new DelayLakeError(`${url} answers ${status}, ${reason}: ${WHOSE}`, { requestId });
  }
  throw new (statusError(status))(reason, { requestId });
}

function isKey(message: Named): message is Key {
  return typeof message === "object" && "scheduleKey" in message;
}

function stateOf(state: string): string {
  return state === STATES.cancelled ? "cancelled" : state;
}

/** Returns the id of a message in the topic or partition that the path names. */
function idInTopic(id: MessageId): string {
  return id.batchIndex < 0 ? `${id.ledgerId}:${id.entryId}` : `${id.ledgerId}:${id.entryId}:${id.batchIndex}`;
}

/** Returns the id of a dead letter's source message; batchIndex -1: the entry was one message. */
function letterId(id: MessageId): string {
  return `${id.ledgerId}:${id.entryId}:${id.batchIndex}`;
}

/** Returns the path of a topic's calls, or of a message's partition: `orders` is `persistent://public/default/orders`. */
function topicPath(topic: string, id?: MessageId): string {
  const [, domain = "persistent", rest] = /^(?:(\w[\w-]*):\/\/)?(.*)$/s.exec(topic)!;
  const parts = topic.includes("/") ? rest!.split("/") : ["public", "default", rest!];
  const names = [parts[0], parts[1], parts.slice(2).join("/")];
  if (domain !== "persistent" || !names.every(Boolean)) throw new TypeError(`no persistent topic: ${topic}`);
  const suffix = id !== undefined && id.partition >= 0 ? `-partition-${id.partition}` : "";
  if (!names[2]!.endsWith(suffix)) names[2] += suffix;
  return `/admin/v2/persistent/${names.map((name) => encodeURIComponent(name!)).join("/")}`;
}
