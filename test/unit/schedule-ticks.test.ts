/** When schedules are due: compared, tick by tick, with a clock on the wall that is looked at every minute. */
import { describe, expect, inject, test } from "vitest";
import { type When, due, nextRuns, rhythmOf } from "../../packages/holdfast/src/schedule/ticks.ts";
import { random } from "../harness/random.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const minute = 60_000;
const hour = 60 * minute;
const day = 24 * hour;

async function times(when: When, from: string, count: number): Promise<string[]> {
  return (await nextRuns(when, count, new Date(from))).map((at) => at.toISOString().replace(":00.000Z", "Z"));
}

/** What a clock in that place shows. */
function wall(timeZone: string, at: number) {
  const format = (formats[timeZone] ??= new Intl.DateTimeFormat("sv", {
    timeZone,
    dateStyle: "short",
    timeStyle: "medium",
  }));
  const text = format.format(at).replace(" ", "T");
  return { text, at: Date.parse(`${text}Z`) };
}
const formats: Record<string, Intl.DateTimeFormat> = {};

describe("clocks are put forward", () => {
  test.each([
    // There is no 02:30 on the 29th: it runs when that hour would have begun.
    [
      "Europe/Madrid",
      "30 2 * * *",
      "2026-03-28T00:00:00Z",
      ["2026-03-28T01:30Z", "2026-03-29T01:00Z", "2026-03-30T00:30Z"],
    ],
    [
      "America/New_York",
      "30 2 * * *",
      "2026-03-07T00:00:00Z",
      ["2026-03-07T07:30Z", "2026-03-08T07:00Z", "2026-03-09T06:30Z"],
    ],
    // By half an hour: 02:00 becomes 02:30.
    [
      "Australia/Lord_Howe",
      "15 2 * * *",
      "2026-10-02T00:00:00Z",
      ["2026-10-02T15:45Z", "2026-10-03T15:30Z", "2026-10-04T15:15Z"],
    ],
  ])("%s, at a fixed time: once a day", async (timeZone, cron, from, expected) => {
    expect(await times({ cron, timeZone }, from, 3)).toEqual(expected);
  });

  test("every half hour: none is left out, none comes twice", async () => {
    expect(
      await times({ cron: "*/30 * * * *", timeZone: "Europe/Madrid" }, "2026-03-29T00:10:00Z", 4),
    ).toEqual(["2026-03-29T00:30Z", "2026-03-29T01:00Z", "2026-03-29T01:30Z", "2026-03-29T02:00Z"]);
  });
});

describe("clocks are put back", () => {
  test.each([
    // 02:30 comes twice on the 25th: it runs at the first.
    [
      "Europe/Madrid",
      "30 2 * * *",
      "2026-10-24T00:00:00Z",
      ["2026-10-24T00:30Z", "2026-10-25T00:30Z", "2026-10-26T01:30Z"],
    ],
    [
      "America/New_York",
      "30 1 * * *",
      "2026-10-31T00:00:00Z",
      ["2026-10-31T05:30Z", "2026-11-01T05:30Z", "2026-11-02T06:30Z"],
    ],
    [
      "Australia/Lord_Howe",
      "45 1 * * *",
      "2026-04-03T00:00:00Z",
      ["2026-04-03T14:45Z", "2026-04-04T14:45Z", "2026-04-05T15:15Z"],
    ],
  ])("%s, at a fixed time: once a day", async (timeZone, cron, from, expected) => {
    expect(await times({ cron, timeZone }, from, 3)).toEqual(expected);
  });

  test("every half hour: both hours are run through", async () => {
    expect(
      await times({ cron: "*/30 * * * *", timeZone: "Europe/Madrid" }, "2026-10-25T00:10:00Z", 4),
    ).toEqual(["2026-10-25T00:30Z", "2026-10-25T01:00Z", "2026-10-25T01:30Z", "2026-10-25T02:00Z"]);
  });
});

test("days and weeks begin when they begin there, of 23, 24 and 25 hours", async () => {
  const daily = { every: "1 day", timeZone: "Europe/Madrid" } as const;
  expect(await times(daily, "2026-03-28T12:00:00Z", 3)).toEqual([
    "2026-03-28T23:00Z",
    "2026-03-29T22:00Z",
    "2026-03-30T22:00Z",
  ]);
  expect(await times(daily, "2026-10-24T12:00:00Z", 3)).toEqual([
    "2026-10-24T22:00Z",
    "2026-10-25T23:00Z",
    "2026-10-26T23:00Z",
  ]);
  expect(await times({ every: "day", timeZone: "America/New_York" }, "2026-11-01T00:00:00Z", 2)).toEqual([
    "2026-11-01T04:00Z",
    "2026-11-02T05:00Z",
  ]);
  expect(await times({ every: "day", timeZone: "Australia/Lord_Howe" }, "2026-04-04T00:00:00Z", 3)).toEqual([
    "2026-04-04T13:00Z",
    "2026-04-05T13:30Z",
    "2026-04-06T13:30Z",
  ]);
  // At midnight of that day the clocks went from 00:00 to 01:00: the day began then.
  expect(await times({ every: "day", timeZone: "America/Havana" }, "2026-03-08T00:00:00Z", 1)).toEqual([
    "2026-03-08T05:00Z",
  ]);
  // There was no 30 December 2011 in Samoa.
  expect(await times({ every: "day", timeZone: "Pacific/Apia" }, "2011-12-28T12:00:00Z", 3)).toEqual([
    "2011-12-29T10:00Z",
    "2011-12-30T10:00Z",
    "2011-12-31T10:00Z",
  ]);
  expect(await times({ every: "week", timeZone: "Europe/Madrid" }, "2026-10-20T12:00:00Z", 2)).toEqual([
    "2026-10-25T23:00Z",
    "2026-11-01T23:00Z",
  ]);
});

test("shorter ones are counted from 1970, whatever the zone", async () => {
  const from = "2026-10-25T00:10:00Z";
  expect(await times({ every: "15 minutes" }, from, 2)).toEqual(["2026-10-25T00:15Z", "2026-10-25T00:30Z"]);
  expect(await times({ every: "6 hours", timeZone: "Europe/Madrid" }, from, 2)).toEqual([
    "2026-10-25T06:00Z",
    "2026-10-25T12:00Z",
  ]);
  expect((await nextRuns({ every: 250 }, 3, new Date(1100))).map(Number)).toEqual([1250, 1500, 1750]);
  // Exactly at a tick: the next one.
  expect((await nextRuns({ every: 250 }, 1, new Date(1250))).map(Number)).toEqual([1500]);
});

test("what is wrong is said", async () => {
  const wrong: [unknown, RegExp][] = [
    [{}, /either `cron`.* or `every`/],
    [{ cron: "* * * * *", every: "day" }, /either `cron`.* or `every`/],
    [{ every: "fortnight" }, /every must be/],
    [{ every: 0 }, /every must be/],
    [{ every: "0 days" }, /every must be/],
    [{ every: 1.5 }, /every must be/],
    [{ cron: "" }, /cron must be a pattern/],
    [{ cron: "61 * * * *" }, /no cron pattern/],
    [{ cron: {} }, /nextRun/],
    [{ cron: "* * * * *", timeZone: "Europe/Atlantis" }, /no time zone "Europe\/Atlantis"/],
  ];
  for (const [when, text] of wrong) await expect(nextRuns(when as When)).rejects.toThrow(text);
});

test("a parser of one's own", async () => {
  const full = { nextRun: (after: Date) => new Date((Math.floor(after.getTime() / hour) + 1) * hour) };
  expect(await times({ cron: full }, "2026-01-01T00:30:00Z", 2)).toEqual([
    "2026-01-01T01:00Z",
    "2026-01-01T02:00Z",
  ]);
  // One that stands still must not keep anybody busy for ever.
  const stuck = { nextRun: (after: Date) => after };
  await expect(nextRuns({ cron: stuck }, 2, new Date(3_500))).resolves.toHaveLength(2);
  const back = { nextRun: (after: Date) => new Date(after.getTime() - day) };
  await expect(nextRuns({ cron: back }, 2)).rejects.toThrow("comes after it");
});

// Those in which something odd happens, at odd times, by odd amounts; and some.
const zones = [
  "UTC",
  "Europe/Madrid",
  "Europe/Dublin",
  "America/New_York",
  "America/St_Johns",
  "America/Havana",
  "America/Sao_Paulo",
  "America/Santiago",
  "Australia/Lord_Howe",
  "Australia/Adelaide",
  "Asia/Kathmandu",
  "Asia/Tehran",
  "Africa/Casablanca",
  "Pacific/Apia",
  "Pacific/Chatham",
  "Antarctica/Troll",
];

interface Fields {
  readonly minutes: readonly number[];
  readonly hours: readonly number[];
  readonly weekdays: readonly number[];
}

/** A pattern with stars or lists, not only fixed times: it goes by what the clock shows, whenever it shows it. */
function pattern(next: () => number): { cron: string; fields: Fields } {
  const step = [1, 5, 7, 15, 20, 30][Math.floor(next() * 6)] as number;
  const minutes = Array.from({ length: 60 }, (_, i) => i).filter((i) => i % step === 0);
  const every = Array.from({ length: 24 }, (_, i) => i);
  const first = Math.floor(next() * 20);
  const some = next() < 0.5;
  const hours = some ? every.filter((i) => i >= first && i <= first + 3) : every;
  const weekend = next() < 0.3;
  return {
    cron: `*/${step} ${some ? `${first}-${first + 3}` : "*"} * * ${weekend ? "0,6" : "*"}`,
    fields: { minutes, hours, weekdays: weekend ? [0, 6] : [0, 1, 2, 3, 4, 5, 6] },
  };
}

function shows({ minutes, hours, weekdays }: Fields, timeZone: string, at: number): boolean {
  const clock = new Date(wall(timeZone, at).at);
  return (
    clock.getUTCSeconds() === 0 &&
    minutes.includes(clock.getUTCMinutes()) &&
    hours.includes(clock.getUTCHours()) &&
    weekdays.includes(clock.getUTCDay())
  );
}

/** A moment near a change of the clocks, if there is one in that half year. */
function odd(timeZone: string, next: () => number): number {
  let at = Date.UTC(2005 + Math.floor(next() * 25), Math.floor(next() * 12), 1);
  const offset = (moment: number) => wall(timeZone, moment).at - moment;
  for (let days = 0; days < 200 && offset(at) === offset(at + day); days++) at += day;
  return at + Math.floor(next() * 12 * hour) - 3 * hour;
}

describe("random zones and times", () => {
  test.for(Array.from({ length: long ? 200 : 8 }, (_, i) => i))("cron, seed + %i", async (i) => {
    const seed = inject("seed") + i;
    const next = random(seed);
    const timeZone = zones[Math.floor(next() * zones.length)] as string;
    const { cron, fields } = pattern(next);
    const from = odd(timeZone, next);
    const until = from + 36 * hour;
    const hint = `HOLDFAST_SEED=${seed} ${cron} ${timeZone} from ${new Date(from).toISOString()}`;
    const rhythm = rhythmOf({ cron, timeZone });
    const expected: number[] = [];
    for (let at = Math.ceil(from / minute) * minute; at <= until; at += minute)
      if (at > from && shows(fields, timeZone, at)) expected.push(at);
    const found: number[] = [];
    for (let at = rhythm.after(from); at !== undefined && at <= until; at = rhythm.after(at)) found.push(at);
    expect(found, hint).toEqual(expected);
    // From wherever one asks, the answer is the same.
    for (let k = 0; k < 20; k++) {
      const asked = from + Math.floor(next() * (until - from));
      const after = expected.find((at) => at > asked);
      if (after !== undefined) expect(rhythm.after(asked), `${hint} asked at ${asked}`).toBe(after);
    }
    // What is due is the newest of them, in order.
    const limit = 1 + Math.floor(next() * 30);
    expect(await due(rhythm, from, until, limit), hint).toEqual(expected.slice(-limit));
  });

  test.for(Array.from({ length: long ? 200 : 12 }, (_, i) => i))("days, seed + %i", async (i) => {
    const seed = inject("seed") + i;
    const next = random(seed);
    const timeZone = zones[Math.floor(next() * zones.length)] as string;
    const from = odd(timeZone, next);
    const until = from + 10 * day;
    const hint = `HOLDFAST_SEED=${seed} ${timeZone} from ${new Date(from).toISOString()}`;
    const rhythm = rhythmOf({ every: "1 day", timeZone });
    // A day begins when its date is first shown. In St. John's the clocks were put back at one minute past midnight.
    const expected: number[] = [];
    let latest = "";
    for (let at = Math.floor((from - day) / minute) * minute; at <= until; at += minute) {
      const { text } = wall(timeZone, at);
      if (text.slice(0, 10) <= latest) continue;
      latest = text.slice(0, 10);
      if (at > from) expected.push(at);
    }
    const found: number[] = [];
    for (let at = rhythm.after(from); at !== undefined && at <= until; at = rhythm.after(at)) found.push(at);
    expect(found, hint).toEqual(expected);
    expect(await due(rhythm, from, until, 3), hint).toEqual(expected.slice(-3));
  });

  test("multiples of any length, after any pause", async () => {
    const seed = inject("seed");
    const next = random(seed);
    for (let k = 0; k < 200; k++) {
      const every = 1 + Math.floor(next() ** 4 * 10 * day);
      const rhythm = rhythmOf({ every });
      const from = Math.floor(next() * 2e12);
      const until = from + Math.floor(next() * 500) * every;
      const limit = 1 + Math.floor(next() * 40);
      const expected: number[] = [];
      for (let at = Math.floor(from / every) * every + every; at <= until; at += every) expected.push(at);
      expect(
        await due(rhythm, from, until, limit),
        `HOLDFAST_SEED=${seed} ${every} ${from} ${until}`,
      ).toEqual(expected.slice(-limit));
    }
  });
});

test("years of ticks that were missed are not counted one by one", async () => {
  const asked: number[] = [];
  const { after, leastMs } = rhythmOf({ every: "1 second" });
  const rhythm = { leastMs, after: (at: number) => (asked.push(at), after(at)) };
  const now = Date.UTC(2026, 0, 1);
  expect(await due(rhythm, 0, now, 3)).toEqual([now - 2000, now - 1000, now]);
  expect(asked.length).toBeLessThan(20);
  const [yearly] = await due(rhythmOf({ cron: "0 0 1 1 *" }), 0, now - 1, 1);
  expect(yearly).toBe(Date.UTC(2025, 0, 1));
});
