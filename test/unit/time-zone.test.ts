/** What clocks show, when a day begins, and when a time comes: on days with changes of the clock, and in odd zones. */
import { describe, expect, inject, test } from "vitest";
import {
  aheadOf,
  checkZone,
  day,
  dayStart,
  nextReached,
  nextShown,
  wallClock,
} from "../../packages/holdfast/src/time/zone.ts";
import { random } from "../harness/random.ts";

const minute = 60_000;
const hour = 60 * minute;
const iso = (at: number | undefined) => (at === undefined ? "never" : new Date(at).toISOString());

describe("how far ahead of UTC", () => {
  test.each([
    ["Asia/Kathmandu", "2026-01-01T00:00:00Z", 345],
    // A quarter of an hour was added at midnight.
    ["Asia/Kathmandu", "1985-12-31T18:29:59Z", 330],
    ["Asia/Kathmandu", "1985-12-31T18:30:00Z", 345],
    ["Pacific/Chatham", "2026-01-01T00:00:00Z", 825],
    ["Pacific/Chatham", "2026-07-01T00:00:00Z", 765],
    ["Australia/Lord_Howe", "2026-01-01T00:00:00Z", 660],
    ["Australia/Lord_Howe", "2026-07-01T00:00:00Z", 630],
    ["Africa/Monrovia", "1971-06-01T00:00:00Z", -44.5],
    ["America/St_Johns", "2026-01-01T00:00:00Z", -210],
    ["Pacific/Kiritimati", "2026-01-01T00:00:00Z", 840],
    ["+05:30", "2026-01-01T00:00:00Z", 330],
    ["UTC", "2026-01-01T00:00:00.999Z", 0],
  ])("%s at %s: %s minutes", (zone, at, minutes) => {
    expect(aheadOf(zone, Date.parse(at)) / minute).toBe(minutes);
  });
});

describe("a day begins", () => {
  test.each([
    ["Europe/Madrid", "2026-03-29", "2026-03-28T23:00:00.000Z"],
    ["Europe/Madrid", "2026-10-25", "2026-10-24T22:00:00.000Z"],
    ["Asia/Kathmandu", "2026-06-01", "2026-05-31T18:15:00.000Z"],
    // There is no midnight: 23:59 is followed by 01:00.
    ["America/Sao_Paulo", "2018-11-04", "2018-11-04T03:00:00.000Z"],
    ["America/Havana", "2026-03-08", "2026-03-08T05:00:00.000Z"],
    ["Asia/Beirut", "2026-03-29", "2026-03-28T22:00:00.000Z"],
    // Midnight comes twice: at 01:00 clocks are put back to it.
    ["America/Havana", "2026-11-01", "2026-11-01T04:00:00.000Z"],
    // One minute into the day it is the day before again.
    ["America/St_Johns", "2010-11-07", "2010-11-07T02:30:00.000Z"],
    // Over the date line: there was no 30th, and it begins with the 29th.
    ["Pacific/Apia", "2011-12-29", "2011-12-29T10:00:00.000Z"],
    ["Pacific/Apia", "2011-12-30", "2011-12-29T10:00:00.000Z"],
    ["Pacific/Apia", "2011-12-31", "2011-12-30T10:00:00.000Z"],
    ["Africa/Monrovia", "1971-06-01", "1971-06-01T00:44:30.000Z"],
  ])("%s, %s", (zone, date, expected) => {
    expect(iso(dayStart(zone, Date.parse(date)))).toBe(expected);
  });
});

describe("a time on the wall comes", () => {
  const at = (time: string) => (wall: number) => {
    const [hours = 0, minutes = 0] = time.split(":").map(Number);
    const today = Math.floor(wall / day) * day + hours * hour + minutes * minute;
    return today > wall ? today : today + day;
  };
  test.each([
    // Put forward: 02:00 becomes 03:00, and there is no 02:30.
    [
      "Europe/Madrid",
      "02:30",
      "2026-03-28T12:00:00Z",
      "2026-03-29T01:00:00.000Z",
      "2026-03-30T00:30:00.000Z",
    ],
    // Put back: 03:00 becomes 02:00, and 02:30 comes twice.
    [
      "Europe/Madrid",
      "02:30",
      "2026-10-24T12:00:00Z",
      "2026-10-25T00:30:00.000Z",
      "2026-10-25T00:30:00.000Z",
    ],
    [
      "Europe/Madrid",
      "02:30",
      "2026-10-25T00:30:00Z",
      "2026-10-26T01:30:00.000Z",
      "2026-10-25T01:30:00.000Z",
    ],
    // By half an hour.
    [
      "Australia/Lord_Howe",
      "02:15",
      "2026-10-03T12:00:00Z",
      "2026-10-03T15:30:00.000Z",
      "2026-10-04T15:15:00.000Z",
    ],
    [
      "Asia/Kathmandu",
      "00:00",
      "2026-01-01T00:00:00Z",
      "2026-01-01T18:15:00.000Z",
      "2026-01-01T18:15:00.000Z",
    ],
    // The day that was left out.
    ["Pacific/Apia", "12:00", "2011-12-29T23:00:00Z", "2011-12-30T10:00:00.000Z", "2011-12-30T22:00:00.000Z"],
  ])("%s, %s after %s: is reached at %s, is shown at %s", (zone, time, after, reached, shown) => {
    expect(iso(nextReached(zone, Date.parse(after), at(time)))).toBe(reached);
    expect(iso(nextShown(zone, Date.parse(after), at(time)))).toBe(shown);
  });

  test("never, if nothing is wanted", () => {
    expect(nextReached("Europe/Madrid", 0, () => undefined)).toBeUndefined();
    expect(nextShown("Europe/Madrid", 0, () => undefined)).toBeUndefined();
  });
});

const zones = Intl.supportedValuesOf("timeZone");

test.for(Array.from({ length: 40 }, (_, i) => i))("any zone, any day, seed + %i", (i) => {
  const seed = inject("seed") + i;
  const next = random(seed);
  const zone = zones[Math.floor(next() * zones.length)] as string;
  const shown = new Intl.DateTimeFormat("sv", { timeZone: zone, dateStyle: "short", timeStyle: "medium" });
  for (let k = 0; k < 25; k++) {
    const at = Math.floor(Date.UTC(1970, 0, 1) + next() * 68 * 365 * day);
    const hint = `HOLDFAST_SEED=${seed - i} + ${i} ${zone} ${iso(at)}`;
    const wall = wallClock(zone, at);
    expect(`${iso(wall).slice(0, 19)}Z`, hint).toBe(`${shown.format(at).replace(" ", "T")}Z`);
    const midnight = Math.floor(wall / day) * day;
    const [start, end] = [dayStart(zone, midnight), dayStart(zone, midnight + day)];
    // What the clock shows is of this day, or was: it may have been put back past midnight.
    expect(start, hint).toBeLessThanOrEqual(at);
    // A day that was left out begins with the one before.
    if (end !== start) expect(end, hint).toBeGreaterThan(at - 2 * hour);
    expect(Math.floor(wallClock(zone, start) / day) * day, hint).toBe(midnight);
    expect(Math.floor(wallClock(zone, start - 1000) / day) * day, hint).toBeLessThan(midnight);
    // Midnight is reached when the day begins, wherever one asks from.
    expect(iso(nextReached(zone, start - 1 - Math.floor(next() * 20 * hour), () => midnight)), hint).toBe(
      iso(start),
    );
    // What is shown is wanted, and comes after that.
    const wanted = (from: number) => (Math.floor(from / (37 * minute)) + 1) * 37 * minute;
    const found = nextShown(zone, at, wanted) as number;
    expect(found, hint).toBeGreaterThan(at);
    // Before 1970 the remainder of a negative number is -0.
    expect(Math.abs(wallClock(zone, found) % (37 * minute)), hint).toBe(0);
  }
});

test("a zone that there is not", () => {
  expect(() => checkZone("quota", "Europe/Atlantis")).toThrow(
    'quota: there is no time zone "Europe/Atlantis". Use a name such as "Europe/Madrid" or "UTC"',
  );
  expect(() => checkZone("schedule", undefined)).toThrow("schedule: there is no time zone undefined");
  expect(checkZone("schedule", "Asia/Tokyo")).toBe("Asia/Tokyo");
});
