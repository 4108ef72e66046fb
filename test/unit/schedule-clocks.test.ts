/**
 * What the table in docs/schedules.md promises where clocks are put forward and back, worked out a second time: by looking
 * at a clock on the wall, minute after minute, and at nothing else.
 */
import { createRequire } from "node:module";
import { describe, expect, inject, test } from "vitest";
import { type Rhythm, cronOf, nextRuns, rhythmOf } from "../../packages/holdfast/src/schedule/ticks.ts";
import { random } from "../harness/random.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const minute = 60_000;
const hour = 60 * minute;
const day = 24 * hour;

const older = createRequire(new URL("../../older/package.json", import.meta.url));
const versions: Record<string, object> = {
  "croner 11": older("croner"),
  "croner 10": older("croner-10"),
  "croner 9": older("croner-9"),
};
const newest = versions["croner 11"] as object;

/** What a clock in that place shows, as if it were UTC. */
function wall(timeZone: string, at: number): number {
  const format = (formats[timeZone] ??= new Intl.DateTimeFormat("sv", {
    timeZone,
    dateStyle: "short",
    timeStyle: "medium",
  }));
  return Date.parse(`${format.format(at).replace(" ", "T")}Z`);
}
const formats: Record<string, Intl.DateTimeFormat> = {};

interface Spec {
  readonly cron: string;
  /** Whether it names this time: of UTC. */
  readonly names: (clock: Date) => boolean;
  /** Each time that it names comes once a day. Otherwise: whenever the clock shows it. */
  readonly fixed: boolean;
}

/** Numbers that a field of lists, ranges and steps stands for. */
function numbers(field: string, least: number, most: number): Set<number> {
  const found = new Set<number>();
  for (const part of field.split(",")) {
    const [range = "", step = "1"] = part.split("/");
    const [from = "", to = from] = range === "*" ? [String(least), String(most)] : range.split("-");
    for (let i = Number(from); i <= Number(to); i += Number(step)) found.add(i);
  }
  return found;
}

function spec(cron: string): Spec {
  const fields = cron.split(" ");
  const [minutes, hours, days, months, weekdays] = [
    numbers(fields[0] as string, 0, 59),
    numbers(fields[1] as string, 0, 23),
    numbers(fields[2] as string, 1, 31),
    numbers(fields[3] as string, 1, 12),
    numbers(fields[4] as string, 0, 6),
  ];
  return {
    cron,
    fixed: !/\*/.test(`${fields[0]}${fields[1]}`),
    names: (clock) =>
      clock.getUTCSeconds() === 0 &&
      minutes.has(clock.getUTCMinutes()) &&
      hours.has(clock.getUTCHours()) &&
      days.has(clock.getUTCDate()) &&
      months.has(clock.getUTCMonth() + 1) &&
      weekdays.has(clock.getUTCDay()),
  };
}

const usual = [
  // Times that are named one by one, around each hour at which clocks are changed somewhere.
  "30 2 * * *",
  "0 2 * * *",
  "0 3 * * *",
  "0 0 * * *",
  "15 0 * * *",
  "59 23 * * *",
  "30 23 * * *",
  "45 1 * * *",
  "30 22 * * 6",
  "30 0 * * 0",
  "0 0 1 * *",
  "0 2,14 * * *",
  "0,30 1-3 * * *",
  "10-50/20 0,2,23 * * *",
  "0 21-23 * * *",
  // Those that go by the clock.
  "0 * * * *",
  "*/30 * * * *",
  "*/20 2 * * *",
  "0 */2 * * *",
  "15,45 * * * 0",
  "*/15 0-2,22-23 * * *",
].map(spec);

function randomSpec(next: () => number): Spec {
  const upTo = (n: number) => Math.floor(next() * n);
  const pick = <T>(list: readonly T[]): T => list[upTo(list.length)] as T;
  const field = (size: number, star: boolean) => {
    const from = upTo(size);
    const to = from + upTo(size - from);
    const forms = [
      `${from}`,
      `${from},${upTo(size)}`,
      `${from}-${to}`,
      `${from}-${to}/${1 + upTo(size - 1)}`,
    ];
    return pick(star ? [...forms, `*/${1 + upTo(size / 2)}`, "*"] : forms);
  };
  // Every minute of a day is nothing new, and takes long.
  const minutes = pick([
    `${upTo(60)}`,
    `${upTo(60)},${upTo(60)}`,
    `*/${10 + upTo(30)}`,
    `0-59/${10 + upTo(30)}`,
  ]);
  return spec(`${minutes} ${field(24, true)} * * ${pick(["*", "*", "0,6", `${upTo(7)}`])}`);
}

/** What a clock in that place shows, minute after minute. */
interface Watch {
  readonly timeZone: string;
  readonly from: number;
  readonly until: number;
  readonly shown: readonly (readonly [at: number, wall: number])[];
}

const watches = new Map<string, Watch>();

function watch(timeZone: string, change: number): Watch {
  const known = watches.get(`${timeZone} ${change}`);
  if (known) return known;
  const from = change - 20 * hour;
  const until = change + 20 * hour;
  // Two days more, of which is known what was shown before. Liberia was 44 minutes and 30 seconds behind.
  const seconds = (from - 2 * day - wall(timeZone, from - 2 * day)) % minute !== 0;
  const step = seconds ? minute / 2 : minute;
  const shown: [number, number][] = [];
  for (let at = Math.floor((from - 2 * day) / minute) * minute; at <= until; at += step)
    shown.push([at, wall(timeZone, at)]);
  const watched = { timeZone, from, until, shown };
  // In the long run they would be too many.
  if (!long) watches.set(`${timeZone} ${change}`, watched);
  return watched;
}

/** What is promised, by the book. */
function promised({ fixed, names }: Spec, { from, until, shown }: Watch): number[] {
  const ticks: number[] = [];
  const named = new Map<number, boolean>();
  const isNamed = (time: number) => {
    const known = named.get(time);
    if (known !== undefined) return known;
    const found = names(new Date(time));
    named.set(time, found);
    return found;
  };
  let furthest = (shown[0] as readonly [number, number])[1];
  for (const [at, time] of shown) {
    let comes = !fixed && isNamed(time);
    if (fixed && time > furthest) {
      // Clocks have got to these since we looked: to one of them, or to some at once.
      for (let passed = Math.floor(furthest / minute + 1) * minute; passed <= time; passed += minute)
        comes ||= isNamed(passed);
      furthest = time;
    }
    if (comes && at > from && at <= until) ticks.push(at);
  }
  return ticks;
}

function found(rhythm: Rhythm, from: number, until: number): number[] {
  const ticks: number[] = [];
  for (let at = rhythm.after(from); at !== undefined && at <= until; at = rhythm.after(at)) ticks.push(at);
  return ticks;
}

function compare(croner: object, { cron, ...rest }: Spec, watched: Watch, next: () => number): void {
  const { timeZone, from, until } = watched;
  const hint = `${cron} ${timeZone} from ${new Date(from).toISOString()}`;
  const rhythm = cronOf(croner, cron, timeZone);
  const expected = promised({ cron, ...rest }, watched);
  const iso = (ticks: number[]) => ticks.map((at) => new Date(at).toISOString());
  expect(iso(found(rhythm, from, until)), hint).toEqual(iso(expected));
  // From wherever one asks, the answer is the same.
  const asked = from + Math.floor(next() * (until - from));
  const after = expected.find((at) => at > asked);
  if (after !== undefined) expect(rhythm.after(asked), `${hint} asked at ${asked}`).toBe(after);
}

const changed = new Map<string, number[]>();

/** When clocks were or will be changed there, to the minute, in a year. */
function changes(timeZone: string, year: number): number[] {
  const known = changed.get(`${timeZone} ${year}`);
  if (known) return known;
  const ahead = (at: number) => wall(timeZone, at) - at;
  const times: number[] = [];
  for (let start = Date.UTC(year, 0, 1); start < Date.UTC(year + 1, 0, 1); start += day) {
    if (ahead(start) === ahead(start + day)) continue;
    let at = start;
    while (ahead(at) === ahead(at + minute)) at += minute;
    times.push(at + minute);
  }
  changed.set(`${timeZone} ${year}`, times);
  return times;
}

/** Of which something is odd: at midnight, by half an hour, by two hours, by a day, at other times from year to year. */
const odd = [
  ["America/Nuuk", 2022, 2023, 2024, 2026],
  ["America/Havana", 2000, 2026],
  ["Asia/Beirut", 2026],
  ["Africa/Cairo", 2010, 2014, 2026],
  ["America/Asuncion", 2022],
  ["America/Santiago", 2026],
  ["America/Sao_Paulo", 2018],
  ["America/St_Johns", 2010, 2026],
  ["America/Scoresbysund", 2024, 2026],
  ["Atlantic/Azores", 2026],
  ["Australia/Lord_Howe", 1982, 2026],
  ["Antarctica/Troll", 2026],
  ["Asia/Tehran", 2022],
  ["Asia/Amman", 2012, 2021],
  ["Asia/Gaza", 2026],
  ["Asia/Pyongyang", 2015, 2018],
  ["Asia/Kathmandu", 1985],
  ["Africa/Casablanca", 2026],
  ["Africa/Monrovia", 1972],
  ["America/Caracas", 2007, 2016],
  ["Europe/Madrid", 1978, 2026],
  ["Europe/Dublin", 2026],
  ["America/New_York", 2026],
  ["Pacific/Apia", 2011],
  ["Pacific/Kwajalein", 1993],
  ["Pacific/Chatham", 2026],
] as const;

describe("as the table says, on the days on which clocks are changed", () => {
  test.for(odd)("%s", ([timeZone, ...years]) => {
    const next = random(inject("seed"));
    const all = years.flatMap((year) => changes(timeZone, year));
    expect(all.length).toBeGreaterThan(0);
    for (const change of all) {
      const watched = watch(timeZone, change);
      for (const one of [...usual, ...Array.from({ length: 2 }, () => randomSpec(next))])
        compare(newest, one, watched, next);
    }
  });

  const zones = Intl.supportedValuesOf("timeZone");

  test.for(Array.from({ length: long ? zones.length : 12 }, (_, i) => i))(
    "any zone, any year, seed + %i",
    (i) => {
      const next = random(inject("seed") + i);
      const timeZone = zones[long ? i : Math.floor(next() * zones.length)] as string;
      const years = Array.from({ length: long ? 12 : 4 }, () => 1970 + Math.floor(next() * 68));
      for (const change of years.flatMap((year) => changes(timeZone, year))) {
        const watched = watch(timeZone, change);
        for (let k = 0; k < 6; k++) compare(newest, randomSpec(next), watched, next);
        compare(newest, usual[Math.floor(next() * usual.length)] as Spec, watched, next);
      }
    },
  );
});

/** As the documentation has it. Madrid: 02:00 becomes 03:00 on 29 March, 03:00 becomes 02:00 on 25 October. */
describe("lists, ranges and steps", () => {
  test.each([
    ["30 2 * * *", ["01:00Z"], ["00:30Z"]],
    // Two times a day are two times a day.
    ["0 2,14 * * *", ["01:00Z", "12:00Z"], ["00:00Z", "13:00Z"]],
    // What is left out comes together with what is named for that moment anyway.
    ["0 2,3 * * *", ["01:00Z"], ["00:00Z", "02:00Z"]],
    ["0,30 2 * * *", ["01:00Z"], ["00:00Z", "00:30Z"]],
    ["0-40/20 2 * * *", ["01:00Z"], ["00:00Z", "00:20Z", "00:40Z"]],
    ["0 1-4 * * *", ["00:00Z", "01:00Z", "02:00Z"], ["-1 23:00Z", "00:00Z", "02:00Z", "03:00Z"]],
    [
      "0,30 1-3 * * *",
      ["00:00Z", "00:30Z", "01:00Z", "01:30Z"],
      ["-1 23:00Z", "-1 23:30Z", "00:00Z", "00:30Z", "02:00Z", "02:30Z"],
    ],
    // A star goes by the clock.
    ["*/20 2 * * *", [], ["00:00Z", "00:20Z", "00:40Z", "01:00Z", "01:20Z", "01:40Z"]],
    [
      "? 2 29,25 * *",
      [],
      Array.from({ length: 120 }, (_, i) => `0${Math.floor(i / 60)}:${String(i % 60).padStart(2, "0")}Z`),
    ],
    ["0 */2 * * *", ["-1 23:00Z", "02:00Z", "04:00Z"], ["-1 22:00Z", "00:00Z", "01:00Z", "03:00Z", "05:00Z"]],
  ])("%s", (cron, gap, twice) => {
    for (const croner of Object.values(versions))
      for (const [date, expected] of [
        ["2026-03-29", gap],
        ["2026-10-25", twice],
      ] as const) {
        const midnight = Date.parse(`${date}T00:00:00Z`) - (date === "2026-03-29" ? hour : 2 * hour);
        // Until the last that is named: a day's pattern of every two hours is long.
        const last = expected.length === 0 ? "20:00Z" : (expected.at(-1) as string);
        const ticks = found(
          cronOf(croner, cron, "Europe/Madrid"),
          midnight - 1,
          Date.parse(`${date}T${last.slice(-6)}`),
        );
        const short = ticks.map((at) => {
          const text = new Date(at).toISOString();
          return `${text.startsWith(date) ? "" : "-1 "}${text.slice(11, 16)}Z`;
        });
        expect(short, `${cron} ${date}`).toEqual(expected);
      }
  });

  test("Nuuk: 23:30 of the Saturday on which there is no such hour comes at midnight", async () => {
    const runs = await nextRuns(
      { cron: "30 23 * * *", timeZone: "America/Nuuk" },
      3,
      new Date("2026-03-28T12:00:00Z"),
    );
    // The clocks went from 23:00 to 00:00.
    expect(runs.map((at) => at.toISOString())).toEqual([
      "2026-03-29T01:00:00.000Z",
      "2026-03-30T00:30:00.000Z",
      "2026-03-31T00:30:00.000Z",
    ]);
  });

  test("seconds, and a pattern that comes to its end while clocks are put back", () => {
    const rhythm = (cron: string) => cronOf(newest, cron, "Europe/Madrid");
    const from = Date.parse("2026-10-24T23:59:00Z");
    const iso = (cron: string, until: string) =>
      found(rhythm(cron), from, Date.parse(until)).map((at) => new Date(at).toISOString());
    expect(iso("15 59 2 * * *", "2026-10-25T02:00:00Z")).toEqual(["2026-10-25T00:59:15.000Z"]);
    expect(iso("*/30 59 2 * * *", "2026-10-25T02:00:00Z")).toEqual([
      "2026-10-25T00:59:00.000Z",
      "2026-10-25T00:59:30.000Z",
      "2026-10-25T01:59:00.000Z",
      "2026-10-25T01:59:30.000Z",
    ]);
    // The last one of all, twice, since the clock shows it twice.
    expect(iso("* 30 2 25 10 * 2026", "2030-01-01T00:00:00Z")).toHaveLength(120);
    expect(iso("0 30 2 25 10 * 2026", "2030-01-01T00:00:00Z")).toEqual(["2026-10-25T00:30:00.000Z"]);
  });
});

describe("versions of croner", () => {
  test.for(Object.keys(versions))("%s: the same times", (version) => {
    const croner = versions[version] as object;
    const next = random(inject("seed"));
    for (const [timeZone, ...years] of odd)
      for (const change of changes(timeZone, years.at(-1) as number)) {
        const watched = watch(timeZone, change);
        for (let k = 0; k < 3; k++) compare(croner, randomSpec(next), watched, next);
      }
  });

  test.for([
    "@daily",
    "@Hourly",
    "? ? * * *",
    "0 ? * * 5",
    "0 0 * * 5L",
    "0 0 * * MON,friL",
    "0 0 * * 5#L",
    "0 0 * * 5#2",
    "0 0 13 * 5",
    "0 0 L * *",
    "0 0 L JUL *",
    "0 0 1-7 * SUN-TUE",
    "30 0 0 ? FEB,APR MON",
    "0 0 29 2 *",
    "0 0 31 2 *",
  ])("%s means the same to all of them", (cron) => {
    const from = Date.UTC(2026, 0, 5, 10, 17);
    const [first, ...others] = Object.values(versions).map((croner) => {
      const rhythm = cronOf(croner, cron);
      const ticks: number[] = [];
      for (let at = rhythm.after(from); at !== undefined && ticks.length < 50; at = rhythm.after(at))
        ticks.push(at);
      return ticks;
    });
    for (const other of others) expect(other).toEqual(first);
  });

  test("whatever the zone of the machine", () => {
    const before = process.env["TZ"];
    const read = () =>
      Object.values(versions).flatMap((croner) =>
        usual.map(({ cron }) =>
          found(cronOf(croner, cron, "Europe/Madrid"), Date.UTC(2026, 2, 28), Date.UTC(2026, 2, 30)),
        ),
      );
    const expected = read();
    try {
      for (const zone of ["America/Havana", "Pacific/Apia", "Asia/Kathmandu"]) {
        process.env["TZ"] = zone;
        expect(read()).toEqual(expected);
      }
    } finally {
      if (before === undefined) delete process.env["TZ"];
      else process.env["TZ"] = before;
    }
  });

  test("one that reads patterns differently is refused", () => {
    const refused = { name: "ScheduleError", code: "HF_CRONER_UNFIT" };
    const text = /croner.* does not read patterns as it should: .*npm install croner@11/;
    const unfit = older("croner-6") as object;
    expect(() => cronOf(unfit, "0 3 * * *")).toThrow(expect.objectContaining(refused));
    expect(() => cronOf(unfit, "0 3 * * *")).toThrow(text);
    // None at all, and one that goes by the machine's zone.
    expect(() => cronOf({}, "0 3 * * *")).toThrow(text);
    class Local {
      nextRun(after: Date): Date {
        return new Date(after.getTime() + day);
      }
    }
    expect(() => cronOf({ Cron: Local }, "0 3 * * *")).toThrow(text);
  });

  test("dates are no patterns", () => {
    for (const cron of [
      "2030-01-01T00:00:00Z",
      "2030-01-01 00:00:00",
      "* * * *",
      "* * * * * * * *",
      "@reboot",
    ])
      for (const croner of Object.values(versions))
        expect(() => cronOf(croner, cron), cron).toThrow(/is no cron pattern/);
  });
});

test("days begin when their midnight is reached, whatever is done to the clocks then", () => {
  for (const [timeZone, ...years] of odd)
    for (const change of years.flatMap((year) => changes(timeZone, year))) {
      const watched = watch(timeZone, change);
      const rhythm = rhythmOf({ every: "1 day", timeZone });
      expect(found(rhythm, watched.from, watched.until), timeZone).toEqual(
        promised(spec("0 0 * * *"), watched),
      );
    }
});
