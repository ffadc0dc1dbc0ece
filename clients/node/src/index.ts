export { Client } from "./client.js";
export type * from "./client.js";
export { DelayLakeError, Forbidden, Gone, Invalid, NoAnswer, NotAllowed, NotFound, TooLate, Unavailable } from "./errors.js";
export { MessageId } from "./messages.js";
export type * from "./messages.js";
export type { Duration, Time } from "./times.js";
