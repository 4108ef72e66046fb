/** When windows of the calendar begin, in zones whose clocks are put forward and back at any hour. */
import { expect, inject, test } from "vitest";
import { rhythmOf } from "../../packages/holdfast/src/schedule/ticks.ts";
import { type Period, spanOf, startsAround } from "../../packages/holdfast/src/time/windows.ts";
import { random } from "../harness/random.ts";

/** Among them: changes at midnight (São Paulo, Havana, Beirut), one minute after it (St John's), of half an hour (Lord Howe), a day that was left out (Apia). */
const zones = [
  "UTC",
  "Europe/Madrid",
  "America/New_York",
  "America/Sao_Paulo",
  "America/Havana",
  "America/St_Johns",
  "Asia/Beirut",
  "Asia/Kathmandu",
  "Australia/Lord_Howe",
  "Africa/Casablanca",
  "Pacific/Apia",
  "Pacific/Kiritimati",
];

const hour = 3_600_000;
const from = Date.UTC(1990, 0, 1);
const until = Date.UTC(2040, 0, 1);

/** The window of a moment, as the database chooses it: the last that has begun, until the next. */
function windowAt(period: Period, zone: string, at: number): readonly [number, number] {
  const starts = startsAround(spanOf("quota", period), zone, at);
  expect(starts, `${period} ${zone} ${at}`).toEqual(starts.toSorted((a, b) => a - b));
  const own = starts.filter((start) => start <= at).at(-1);
  const next = starts.find((start) => start > at);
  expect([typeof own, typeof next], `${period} ${zone} ${new Date(at).toISOString()}`).toEqual([
    "number",
    "number",
  ]);
  return [own as number, next as number];
}

/** Moments at random, and those around changes of the clock. */
function moments(zone: string, next: () => number): number[] {
  const names = new Intl.DateTimeFormat("en", { timeZone: zone, timeZoneName: "longOffset" });
  const offset = (at: number) => names.formatToParts(at).find(({ type }) => type === "timeZoneName")?.value;
  const found: number[] = [];
  const begin = from + Math.floor(next() * (until - from - 800 * 24 * hour));
  for (let at = begin; at < begin + 750 * 24 * hour; at += 24 * hour) {
    if (offset(at) === offset(at + 24 * hour)) continue;
    let [low, high] = [at, at + 24 * hour];
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (offset(middle) === offset(low)) low = middle;
      else high = middle;
    }
    for (const away of [-25 * hour, -2 * hour, -1, 0, 1, hour / 2, hour - 1, hour, 23 * hour])
      found.push(high + away);
  }
  return [...found, ...Array.from({ length: 20 }, () => from + Math.floor(next() * (until - from)))];
}

const lengthOf = { day: 10, week: 10, month: 7, year: 4 } as const;

test.for(zones)("%s: no gap, no overlap, and each begins when its day does", (zone) => {
  const seed = inject("seed");
  const next = random(seed);
  const days = new Intl.DateTimeFormat("sv-SE", { timeZone: zone });
  const weekdays = new Intl.DateTimeFormat("en", { timeZone: zone, weekday: "short" });
  const lengths = {
    day: [22, 49],
    // Apia left out a day.
    week: [142, 194],
    month: [27 * 24, 32 * 24],
    year: [364 * 24, 367 * 24],
  } as const;
  for (const at of moments(zone, next))
    for (const [period, [least, most]] of Object.entries(lengths)) {
      const hint = `HOLDFAST_SEED=${seed} ${period} ${zone} ${new Date(at).toISOString()}`;
      const [own, end] = windowAt(period as Period, zone, at);
      // All of its moments say the same.
      for (const other of [own, end - 1, own + Math.floor(next() * (end - own))])
        expect(
          windowAt(period as Period, zone, other),
          `${hint}, from ${new Date(other).toISOString()}`,
        ).toEqual([own, end]);
      expect(windowAt(period as Period, zone, end)[0], hint).toBe(end);
      expect((end - own) / hour, hint).toBeGreaterThanOrEqual(least);
      expect((end - own) / hour, hint).toBeLessThanOrEqual(most);
      const label = (moment: number) => days.format(moment).slice(0, lengthOf[period as "day"]);
      expect(label(own), hint).not.toBe(label(own - 1));
      if (period === "week") expect(weekdays.format(own), hint).toBe("Mon");
    }
});

test("of hours and less, and of several units, they are counted from 1970", () => {
  const next = random(inject("seed"));
  for (let i = 0; i < 200; i++) {
    const at = from + Math.floor(next() * (until - from));
    const count = 1 + Math.floor(next() * 90);
    for (const [unit, ms] of [
      ["second", 1000],
      ["minute", 60_000],
      ["hour", hour],
    ] as const) {
      const [own, end] = windowAt(`${count} ${unit}s`, "Asia/Kathmandu", at);
      expect([own, end]).toEqual([
        Math.floor(at / (count * ms)) * count * ms,
        (Math.floor(at / (count * ms)) + 1) * count * ms,
      ]);
    }
    const [own, end] = windowAt(`${count} days`, "UTC", at);
    expect([own % (count * 24 * hour), end - own]).toEqual([0, count * 24 * hour]);
  }
});

/** Every day or week of a schedule begins when that of a quota does: they are told by the same clock. */
test.for(zones)("%s: windows begin with the ticks of a schedule of the same length", (zone) => {
  const seed = inject("seed");
  const next = random(seed);
  for (const every of ["1 day", "1 week", "3 days", "2 weeks"] as const) {
    const rhythm = rhythmOf({ every, timeZone: zone });
    for (const at of moments(zone, next)) {
      const [own, end] = windowAt(every, zone, at);
      const hint = `HOLDFAST_SEED=${seed} ${every} ${zone} ${new Date(at).toISOString()}`;
      expect([rhythm.after(own - 1), rhythm.after(own), rhythm.after(at)], hint).toEqual([own, end, end]);
    }
  }
});
