import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, before, beforeEach, test } from "node:test";

import { Client, DelayLakeError, Forbidden, Invalid, NoAnswer, NotFound, TooLate, Unavailable } from "delaylake-client";

/** @typedef {{ method: string | undefined, url: string | undefined, headers: import("node:http").IncomingHttpHeaders, body: string }} Seen */
/** @type {((response: import("node:http").ServerResponse) => void)[]} */
let answers = [];
/** @type {Seen[]} */
let seen = [];
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  seen.push({ method: request.method, url: request.url, headers: request.headers, body });
  (answers.shift() ?? answer(500, { reason: "no more answers" }))(response);
});

/**
 * @param {number} status
 * @param {unknown} content
 * @param {Record<string, string>} headers
 */
function answer(status, content, headers = {}) {
  return (/** @type {import("node:http").ServerResponse} */ response) =>
    response.writeHead(status, { "Content-Type": "application/json", ...headers }).end(JSON.stringify(content));
}

const SCHEDULED = answer(201, { messageId: "7:0:-1:-1", deliverAt: 1_896_069_600_000 });

/** @param {import("node:http").ServerResponse} response */
function hangUp(response) {
  response.destroy();
}

/** @param {...string} results */
function outcomes(...results) {
  return {
    outcomes: results.map((result, n) => ({ subscription: `s${n}`, ledgerId: 7, entryId: 0, batchIndex: -1, result, reason: "" })),
  };
}

function lake(timeoutMillis = 30_000) {
  const address = server.address();
  assert(address instanceof Object);
  return new Client(`http://127.0.0.1:${address.port}/`, { token: async () => "secret\n", timeoutMillis });
}

before(() => new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(undefined))));
after(() => server.close());
beforeEach(() => {
  answers = [];
  seen = [];
});

test("a call is repeated under the same key until it is answered", async () => {
  answers = [hangUp, answer(503, { reason: "no broker" }), answer(504, {}), SCHEDULED];
  const message = await lake().schedule("orders", { order: 7 }, { after: "10m", key: "customer-7" });
  assert.equal(String(message), "7:0:-1:-1");
  assert.equal(message.deliverAt?.getTime(), 1_896_069_600_000);
  assert.equal(seen.length, 4);
  assert.equal(new Set(seen.map((one) => one.headers["idempotency-key"])).size, 1);
  assert.equal(new Set(seen.map((one) => one.body)).size, 1);
  assert.deepEqual(JSON.parse(seen[0]?.body ?? ""), { payload: { order: 7 }, deliverAfter: 600_000, key: "customer-7" });
  assert.equal(seen[0]?.url, "/admin/v2/persistent/public/default/orders/delayed");
  assert.equal(seen[0]?.headers.authorization, "Bearer secret");
});

test("what the API asks to wait is waited", async () => {
  answers = [answer(429, { reason: "too often" }, { "Retry-After": "1" }), SCHEDULED];
  const began = performance.now();
  await lake().schedule("orders", new Uint8Array([0, 255]), { at: new Date(1_896_069_600_000) });
  assert(performance.now() - began >= 999);
  assert.deepEqual(JSON.parse(seen[0]?.body ?? ""), { payloadBase64: "AP8=", deliverAt: 1_896_069_600_000 });
});

test("after the time is over the error says whether the call may have been done", async () => {
  const closed = createServer();
  await new Promise((resolve) => closed.listen(0, "127.0.0.1", () => resolve(undefined)));
  const address = closed.address();
  assert(address instanceof Object);
  await new Promise((resolve) => closed.close(resolve));
  const nobody = new Client(`http://127.0.0.1:${address.port}`, { timeoutMillis: 300 });
  await assert.rejects(nobody.cancel("orders", "7:0", { deliverAt: 1 }), (error) => {
    assert(error instanceof Unavailable && !(error instanceof NoAnswer));
    assert.match(error.message, /ECONNREFUSED/);
    return true;
  });
  answers = Array(20).fill(hangUp);
  await assert.rejects(lake(300).postpone("orders", "7:0", { by: "-30m", requestId: "mine" }), (error) => {
    assert(error instanceof NoAnswer);
    assert.equal(error.requestId, "mine");
    return true;
  });
  answers = [() => {}];
  await assert.rejects(lake(300).reschedule("orders", "7:0", { at: 5 }), (error) => {
    assert(error instanceof NoAnswer);
    assert.equal(error.deliverAt?.getTime(), 5);
    return true;
  });
});

test("an answer of a proxy does not say that nothing was done", async () => {
  for (const [status, isDone] of /** @type {const} */ ([[502, true], [504, true], [503, false], [429, false]])) {
    answers = [answer(status, {}, { "Retry-After": "60" })]; // longer than a call lasts
    await assert.rejects(lake().skip("orders", "7:0"), (error) => {
      assert(error instanceof Unavailable);
      assert.equal(error instanceof NoAnswer, isDone, String(status));
      return true;
    });
  }
});

test("what is sent again is what was given, also where that has changed since", async () => {
  const payload = { order: 7 };
  answers = [(response) => {
    payload.order = 8;
    hangUp(response);
  }, SCHEDULED];
  await lake().schedule("orders", payload, { after: 1 });
  assert.equal(seen.length, 2);
  assert.equal(seen[0]?.body, seen[1]?.body);
});

test("an error of the caller is not repeated", async () => {
  /** @type {{ self?: unknown }} */
  const cycle = {};
  cycle.self = cycle;
  /** @type {any[]} */
  const wrong = [cycle, { n: 1n }, 1n, null, undefined, NaN, () => 1, new ArrayBuffer(1), new Uint16Array(1), new DataView(new ArrayBuffer(1))];
  for (const payload of wrong) await assert.rejects(lake().schedule("orders", payload, { after: 1 }), TypeError);
  await assert.rejects(lake().schedule("orders", "x", { after: 1, requestId: "a\nb" }), TypeError);
  const url = "http://127.0.0.1:1";
  await assert.rejects(new Client(url, { token: "\u20ac" }).skip("orders", "7:0"), TypeError);
  const failure = new Error("no token");
  const withoutToken = new Client(url, { token: () => Promise.reject(failure) });
  await assert.rejects(withoutToken.skip("orders", "7:0"), (error) => error === failure);
  assert.equal(seen.length, 0);
});

test("a certificate that is refused is not asked for again", async () => {
  let n = 0;
  const refuse = async () => {
    n += 1;
    throw new TypeError("fetch failed", { cause: Object.assign(new Error("certificate has expired"), { code: "CERT_HAS_EXPIRED" }) });
  };
  await assert.rejects(new Client("https://127.0.0.1:1", { fetch: refuse }).skip("orders", "7:0"), (error) => {
    assert(error instanceof Unavailable && !(error instanceof NoAnswer));
    assert.match(error.message, /certificate has expired/);
    return true;
  });
  assert.equal(n, 1);
});

test("ids that are beyond what a number is exact for are told exactly", async () => {
  answers = [(response) => {
    const one = '{"subscription": "a", "ledgerId": 9007199254740993, "entryId": 9223372036854775807, "batchIndex": -1';
    response.end(`{"outcomes": [${one}, "result": "APPLIED", "reason": ""}]}`);
  }];
  const [outcome] = await lake().skip("orders", { scheduleKey: "k" });
  assert.equal(outcome?.message, "9007199254740993:9223372036854775807:-1:-1");
});

test("times and durations are whole ms", async () => {
  answers = Array(2).fill(SCHEDULED);
  await lake().schedule("orders", "x", { at: 5.2, expireAfter: 1500.4 });
  await lake().schedule("orders", "x", { after: "1.5s" });
  assert.deepEqual(seen.map((one) => JSON.parse(one.body)), [
    { payload: "x", deliverAt: 6, expireAfter: 1500 },
    { payload: "x", deliverAfter: 1500 },
  ]);
});

test("a refusal is not repeated, and has its class", async () => {
  for (const [status, kind] of /** @type {const} */ ([[404, NotFound], [422, Invalid], [403, Forbidden]])) {
    seen = [];
    answers = [answer(status, { reason: "because" })];
    await assert.rejects(lake().schedule("orders", "x", { after: 1 }), (error) => {
      assert.equal(Object(error).constructor, kind);
      assert.equal(Object(error).message, "because");
      return true;
    });
    assert.equal(seen.length, 1);
  }
});

test("of several outcomes the gravest is the error", async () => {
  answers = [answer(412, outcomes("NOT_FOUND", "TOO_LATE", "APPLIED"))];
  await assert.rejects(lake().deliverNow("orders", "7:0"), (error) => {
    assert(error instanceof TooLate);
    assert.deepEqual(error.outcomes.map((one) => one.isDone), [false, false, true]);
    return true;
  });
  answers = [answer(200, outcomes("WAITING"))];
  const [waits] = await lake().cancel("orders", "7:0", { deliverAt: 1_000 });
  assert.equal(waits?.isDone, true);
});

test("another server's answers are named", async () => {
  for (const other of [answer(200, { hello: "world" }), answer(404, "nothing here"), answer(500, {})]) {
    answers = [other];
    await assert.rejects(lake().restore("orders", "7:0"), (error) => {
      assert.equal(Object(error).constructor, DelayLakeError);
      assert.match(Object(error).message, /is it delaylake's admin API/);
      return true;
    });
  }
});

test("a command names topic, partition, subscription and message", async () => {
  answers = Array(4).fill(answer(200, outcomes("APPLIED")));
  const client = lake();
  await client.skip("persistent://a/b/c d", "7:0:2:5", { subscription: "x/y" });
  await client.cancel("orders", { scheduleKey: "order-7" });
  await client.retry("orders", "7:0:-1:3", { subscription: "billing", reason: "no", after: "10s" });
  await client.endSchedule("orders", "7:0", { subscription: "billing" });
  const [skip, cancel, retry, end] = seen.map((one) => [one.url, one.body && JSON.parse(one.body)]);
  assert.deepEqual(skip, ["/admin/v2/persistent/a/b/c%20d-partition-2/subscription/x%2Fy/skipByMessageIds", ["7:0:5"]]);
  const topic = "/admin/v2/persistent/public/default/orders";
  assert.deepEqual(cancel, [`${topic}/cancelDelayedMessage`, { scheduleKey: "order-7", subscriptionNames: ["*"] }]);
  const asked = { messageIds: ["7:0:3"], reason: "no", afterMillis: 10_000 };
  assert.deepEqual(retry, [`${topic}/subscription/billing/retry`, asked]);
  assert.deepEqual(end, [`${topic}/schedules/7:0?subscriptionNames=billing`, ""]);
});

test("a listing goes on from page to page, up to its limit", async () => {
  const one = {
    messageId: "7:0:-1:-1", deliverAt: null, subscriptions: ["billing"], key: null, orderingKey: null,
    properties: {}, eventTime: 0, publishTime: 1, producerName: "p", expiresAt: 7,
  };
  answers = [
    answer(200, { messages: [one, one], nextCursor: "next" }),
    answer(200, { messages: [one], nextCursor: "more" }),
  ];
  const found = [];
  for await (const message of lake().pending("orders", { limit: 3, properties: { a: "b=c" }, state: "cancelled" })) {
    found.push(message);
  }
  assert.equal(found.length, 3);
  assert.deepEqual([found[0]?.eventTime, found[0]?.deliverAt, found[0]?.expiresAt], [null, null, new Date(7)]);
  const queries = seen.map((call) => new URL(call.url ?? "", "http://x").searchParams);
  assert.deepEqual(queries.map((query) => [query.get("cursor"), query.get("limit")]), [[null, "3"], ["next", "1"]]);
  assert.deepEqual([queries[0]?.get("property"), queries[0]?.get("state")], ["a=b=c", "takenBack"]);
});

test("a wrong argument is told before anything is sent", async () => {
  const client = lake();
  await assert.rejects(client.schedule("orders", "x"), TypeError);
  await assert.rejects(client.schedule("non-persistent://a/b/c", "x", { after: 1 }), TypeError);
  await assert.rejects(client.schedule("orders", "x", { after: "soon" }), RangeError);
  await assert.rejects(client.schedule("orders", "x", { at: new Date("nonsense") }), RangeError);
  await assert.rejects(client.cancel("orders", "7:0"), TypeError);
  await assert.rejects(client.reschedule("orders", "7:0", { after: 1, requestId: "r" }), TypeError);
  await assert.rejects(client.skip("orders", "nonsense"), RangeError);
  /** @type {any[]} */
  const noTimes = [null, "", [], true, "2031-01-01", 2 ** 60];
  for (const at of noTimes) await assert.rejects(client.schedule("orders", "x", { at }), RangeError);
  /** @type {any[]} */
  const noDurations = [null, "", [], true, NaN, ["1s"]];
  for (const after of noDurations) await assert.rejects(client.schedule("orders", "x", { after }), RangeError);
  for (const url of ["localhost:8081", "http://a b", "http://a:99999", "http://me:secret@127.0.0.1"]) {
    assert.throws(() => new Client(url), TypeError);
  }
  for (const timeoutMillis of [0, NaN, Infinity, 2 ** 31]) {
    assert.throws(() => new Client("http://127.0.0.1:1", { timeoutMillis }), RangeError);
  }
  assert.equal(seen.length, 0);
});

test("a re-drive is repeated under the same key, and tells its numbers", async () => {
  answers = [hangUp, answer(200, { matched: 3, redriven: 2, refused: 1 })];
  const found = await lake().redrive("orders", { subscription: "a", messages: ["7:0:-1:-1", "7:1:2:3"], publishedFrom: 5, limit: 9 });
  assert.deepEqual(found, { matched: 3, redriven: 2, alreadyRedriven: 0, refused: 1, unreadable: 0 });
  const filter = { subscription: "a", messageIds: ["7:0:-1", "7:1:3"], publishedFrom: 5 };
  assert.deepEqual(JSON.parse(seen[1]?.body ?? ""), { filter, dryRun: false, max: 9 });
  assert.equal(new Set(seen.map((one) => one.headers["idempotency-key"])).size, 1);
});

test("the state of an entry with several messages is asked for by a batch index", async () => {
  /** @param {...string} ids */
  const page = (...ids) =>
    answer(200, { messages: ids.map((messageId) => ({ messageId, deliverAt: 5, subscriptions: ["a", "b"] })), nextCursor: null });
  answers = [page("7:0:-1:0", "7:0:-1:1"), page("7:0:-1:0"), page("7:0:-1:0", "7:0:-1:1"), page()];
  const state = await lake().get("orders", "7:0:0");
  assert.deepEqual([String(state.message.id), state.waitingFor, state.cancelledFor], ["7:0:-1:0", ["a", "b"], ["a", "b"]]);
  assert.match(seen[1]?.url ?? "", /state=takenBack.*ledgerId=7&entryId=0/);
  await assert.rejects(lake().get("orders", "7:0"), Invalid);
});

test("a schedule is named by its key in the query, and a pause has no body", async () => {
  answers = [answer(200, outcomes("APPLIED")), answer(200, outcomes("APPLIED"))];
  await lake().pauseSchedule("orders", { scheduleKey: "k 1" }, { subscription: "a" });
  await lake().resume("orders", { subscription: "a/b" });
  const path = "/admin/v2/persistent/public/default/orders";
  assert.deepEqual(seen.map((one) => one.url), [
    `${path}/schedules/pause?scheduleKey=k+1&subscriptionNames=a`,
    `${path}/subscription/a%2Fb/resume`,
  ]);
  assert.deepEqual(seen.map((one) => one.body), ["", ""]);
});
