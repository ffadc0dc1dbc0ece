import type { Outcome } from "./messages.js";

export interface ErrorDetails {
  outcomes?: readonly Outcome[];
  requestId?: string;
  deliverAt?: Date | undefined;
  cause?: unknown;
}

/** The base of all errors of this package. A wrong argument is a TypeError or RangeError instead. */
export class DelayLakeError extends Error {
  /** The outcome for each message and subscription, if there are any: some may be done. */
  readonly outcomes: readonly Outcome[];
  /** The request id with which the same call can be repeated. */
  readonly requestId: string;
  /** The new time of a reschedule. To repeat a call that had `after`, give this as `at`. */
  readonly deliverAt: Date | undefined;

  constructor(reason: string, details: ErrorDetails = {}) {
    super(reason, details.cause === undefined ? {} : { cause: details.cause });
    this.name = new.target.name;
    this.outcomes = details.outcomes ?? [];
    this.requestId = details.requestId ?? "";
    this.deliverAt = details.deliverAt;
  }
}

/** The message has been released to the senders, which is some seconds before its time: it is delivered. */
export class TooLate extends DelayLakeError {}

/** There is no such topic, subscription or message. */
export class NotFound extends DelayLakeError {}

/** The subscription's type, Exclusive or Failover, acknowledges cumulatively: cancel instead of skip. */
export class NotAllowed extends DelayLakeError {}

/** The call makes no sense: as to reschedule a cancelled message, or to use another command's request id. */
export class Invalid extends DelayLakeError {}

/** The token is not accepted, or its role may not do this. */
export class Forbidden extends DelayLakeError {}

/** The version of the tables that a listing reads has been removed: begin the listing again. */
export class Gone extends DelayLakeError {}

/** The API could not be reached in the given time, and nothing was done. */
export class Unavailable extends DelayLakeError {}

/** The time was over before the answer came: the call may have been done. It is safe to repeat with its `requestId`. */
export class NoAnswer extends Unavailable {}

export type ErrorClass = new (reason: string, details?: ErrorDetails) => DelayLakeError;

// Of several outcomes the error is that of the first here.
const RESULT_ERRORS = new Map<string, ErrorClass>([
  ["INVALID", Invalid],
  ["NOT_ALLOWED", NotAllowed],
  ["TOO_LATE", TooLate],
  ["NOT_FOUND", NotFound],
]);

const STATUS_ERRORS = new Map<number, ErrorClass>([
  [400, Invalid],
  [401, Forbidden],
  [403, Forbidden],
  [404, NotFound],
  [405, NotAllowed],
  [410, Gone],
  [412, Invalid],
  [413, Invalid],
  [421, Invalid],
  [422, Invalid],
  [429, Unavailable],
  [502, NoAnswer], // of a proxy, whose upstream may have had the call
  [503, Unavailable],
  [504, NoAnswer],
]);

/** Returns the error of the gravest of outcomes that are not done. */
export function gravestError(outcomes: readonly Outcome[], requestId: string, deliverAt: Date | undefined): DelayLakeError {
  const gravity = [...RESULT_ERRORS.keys()];
  const rank = (one: Outcome) => (gravity.includes(one.result) ? gravity.indexOf(one.result) : gravity.length);
  const gravest = outcomes.filter((one) => !one.isDone).reduce((a, b) => (rank(b) < rank(a) ? b : a));
  const kind = RESULT_ERRORS.get(gravest.result) ?? DelayLakeError;
  const text = [gravest.message, gravest.subscription, gravest.result, gravest.reason].filter(String).join(" ");
  return new kind(text, { outcomes, requestId, deliverAt });
}

/** Returns the error class for a status of HTTP. */
export function statusError(status: number): ErrorClass {
  return STATUS_ERRORS.get(status) ?? DelayLakeError;
}
