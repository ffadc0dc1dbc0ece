import { NoAnswer, Unavailable } from "./errors.js";

const FIRST_PAUSE_MILLIS = 100;
const LONGEST_PAUSE_MILLIS = 3_000;
const LEAST_SHARE = 0.1; // of a call's time: no attempt begins when less is left

// Codes of errors after which the API has not received the call.
const NOT_SENT = new Set(["ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "EHOSTUNREACH", "ENETUNREACH", "UND_ERR_CONNECT_TIMEOUT"]);
const CERTIFICATE = /^(CERT_|ERR_TLS_CERT_|UNABLE_TO_|DEPTH_ZERO_SELF_SIGNED_CERT$|SELF_SIGNED_CERT_)/;

/**
 * The attempts of one call: when it is repeated, and with which error it is given up. Every call is safe to repeat,
 * since a command and a message have a request id.
 */
export class Attempts {
  readonly #requestId: string;
  readonly #deadline: number;
  readonly #lastBegin: number;
  #pauseMillis = FIRST_PAUSE_MILLIS;
  #mayBeDone = false;

  /** @param timeoutMillis time for all attempts together */
  constructor(requestId: string, timeoutMillis: number) {
    this.#requestId = requestId;
    this.#deadline = performance.now() + timeoutMillis;
    this.#lastBegin = this.#deadline - LEAST_SHARE * timeoutMillis;
  }

  /** The ms that are left for the next attempt; never 0. */
  get millisLeft(): number {
    return Math.max(Math.ceil(this.#deadline - performance.now()), 1);
  }

  /**
   * Waits before the next attempt.
   *
   * @param error why the last one failed
   * @param retryAfterMillis what the API asks to wait
   * @throws NoAnswer if the time is over, and the call may have been done
   * @throws Unavailable if the time is over, and nothing was done; or at once if the API's certificate is refused
   */
  async pauseAfter(error: unknown, retryAfterMillis = 0): Promise<void> {
    if (error instanceof NoAnswer || !(error instanceof Unavailable || codes(error).some(isNotSent))) this.#mayBeDone = true;
    const pauseMillis = Math.max(this.#pauseMillis * (0.5 + Math.random() / 2), retryAfterMillis);
    if (performance.now() + pauseMillis >= this.#lastBegin || codes(error).some(isCertificate)) {
      const kind = this.#mayBeDone ? NoAnswer : Unavailable;
      throw new kind(text(error), { requestId: this.#requestId, cause: error });
    }
    this.#pauseMillis = Math.min(2 * this.#pauseMillis, LONGEST_PAUSE_MILLIS);
    await new Promise((resolve) => setTimeout(resolve, pauseMillis));
  }
}

function isNotSent(code: string): boolean {
  return NOT_SENT.has(code) || isCertificate(code);
}

function isCertificate(code: string): boolean {
  return CERTIFICATE.test(code);
}

function codes(error: unknown): string[] {
  return causes(error).map((one) => String((one as { code?: unknown }).code));
}

function text(error: unknown): string {
  const reasons = causes(error).map((one) => (one instanceof Error ? one.message : String(one)));
  return reasons.at(-1) || reasons.find(Boolean) || String(error);
}

/** The error with those that have caused it; fetch gives the reason only there. */
function causes(error: unknown): unknown[] {
  const found: unknown[] = [];
  for (let one: unknown = error; one instanceof Object && !found.includes(one); one = (one as { cause?: unknown }).cause) {
    found.push(one);
    if (one instanceof AggregateError) found.push(...one.errors);
  }
  return found;
}
