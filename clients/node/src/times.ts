import { types } from "node:util";

const DURATION = /^(\d{1,18}(?:\.\d{1,18}(?=[a-z]))?)(ms|s|m|h|d)?$/;
const UNIT_MILLIS = new Map([["ms", 1], ["s", 1_000], ["m", 60_000], ["h", 3_600_000], ["d", 86_400_000]]);
const MAX_MILLIS = 253_402_300_799_999; // the end of the year 9999

/** A time: a Date, or ms since the epoch. */
export type Time = Date | number;

/** A duration: ms, or a text such as `90s`, `5m`, `2h` or `1d`. */
export type Duration = number | string;

/** Returns a time as ms since the epoch, rounded up, so that nothing is early. */
export function millis(name: string, time: Time): number {
  const found = typeof time === "number" || types.isDate(time) ? Math.ceil(Number(time)) : NaN;
  if (!(found >= 0 && found <= MAX_MILLIS)) throw new RangeError(`${name} is no time from 1970 to 9999: ${String(time)}`);
  return found;
}

/** Returns a duration as whole ms, which may be negative. */
export function shiftMillis(name: string, duration: Duration): number {
  const text = typeof duration === "number" ? String(Math.round(duration)) : typeof duration === "string" ? duration.trim() : "";
  const found = DURATION.exec(text.replace(/^-/, ""));
  if (!found) throw new RangeError(`${name} is no duration, as 90s, 5m, 2h, 1d or ms: ${JSON.stringify(duration)}`);
  const size = Math.round(Number(found[1]) * UNIT_MILLIS.get(found[2] ?? "ms")!);
  if (size > MAX_MILLIS) throw new RangeError(`${name} is beyond the year 9999: ${JSON.stringify(duration)}`);
  return text.startsWith("-") ? -size : size;
}

/** Returns a duration as ms. */
export function durationMillis(name: string, duration: Duration): number {
  const found = shiftMillis(name, duration);
  if (found < 0) throw new RangeError(`${name} is negative: ${JSON.stringify(duration)}`);
  return found;
}

/** Returns a time of the API's JSON. */
export function moment(sinceEpoch: number): Date;
export function moment(sinceEpoch: number | null): Date | null;
export function moment(sinceEpoch: number | null): Date | null {
  return sinceEpoch === null ? null : new Date(sinceEpoch);
}
