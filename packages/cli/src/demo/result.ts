/** What is told in the end, to people and to programs. */
import { type Finding, type RaceName, type WayName, isOurs } from "./race.ts";

/** wrong: too much, or less than promised. failed: nothing too much, but callers got errors. lucky: it could have been wrong. */
export type Verdict = "exact" | "wrong" | "failed" | "lucky";

export interface WayResult extends Omit<Finding, "took"> {
  readonly way: WayName;
  readonly verdict: Verdict;
  readonly code: readonly string[];
  readonly why: string;
  /** There was nobody to race with. */
  readonly alone: boolean;
  readonly granted: number;
  readonly refused: number;
  /** How many calls ended with an error, by code. */
  readonly failed: Readonly<Record<string, number>>;
  readonly seconds: number;
  readonly opsPerSecond?: number;
  readonly p50Ms?: number;
  readonly p99Ms?: number;
}

export interface RaceResult {
  readonly race: RaceName;
  readonly title: string;
  readonly what: string;
  readonly counts: string;
  readonly ways: readonly WayResult[];
}

export interface DemoResult {
  /** Whether all is exact with Holdfast. */
  readonly exact: boolean;
  readonly postgres: string;
  /** Where it ran, if that was not a server of its own. */
  readonly server?: string;
  readonly processes: number;
  readonly callers: number;
  readonly seconds: number;
  readonly races: readonly RaceResult[];
}

export const marks: Readonly<Record<Verdict, string>> = { exact: "✓", wrong: "✗", failed: "!", lucky: "~" };

export function verdictOf(way: WayName, { right, counted, expected }: Finding): Verdict {
  if (way === "naive") return right ? "lucky" : "wrong";
  if (right) return "exact";
  // What SERIALIZABLE promises, it keeps; trying again is left to the caller.
  return way === "SERIALIZABLE" && counted <= expected ? "failed" : "wrong";
}

export function saidOf({ text, verdict, alone }: WayResult): string {
  if (verdict !== "lucky") return text;
  return `${text} (${alone ? "nobody to race with" : "by luck, this time"})`;
}

/** The reason, unless it came out otherwise. */
export const reasonOf = ({ why, way, verdict }: WayResult): string =>
  verdict === "lucky" || (isOurs(way) && verdict !== "exact") ? "" : why;

export function conclusion({ races, exact, seconds }: DemoResult): string {
  const ways = races.flatMap((race) => race.ways);
  const naive = ways.filter(({ way }) => way === "naive");
  const wrong = naive.filter(({ verdict }) => verdict === "wrong").length;
  const ours = ways.filter(({ way }) => isOurs(way));
  const right = ours.filter(({ verdict }) => verdict === "exact").length;
  const lucky = naive.filter(({ verdict, alone }) => verdict === "lucky" && !alone).length;
  const alone = naive.filter((each) => each.verdict === "lucky" && each.alone).length;
  return [
    `Naive code: ${wrong} of ${naive.length} wrong${lucky > 0 ? `, ${lucky} right by luck` : ""}${alone > 0 ? `, ${alone} with nobody to race with` : ""}.`,
    `With Holdfast: ${right} of ${ours.length} exact${exact ? "" : ", which is a bug in Holdfast or in this demo"}.`,
    `It took ${Math.round(seconds)} s.`,
  ].join(" ");
}

export const speedOf = ({ opsPerSecond }: WayResult): string =>
  opsPerSecond === undefined ? "" : String(Math.round(opsPerSecond));

/** Half of the calls took no longer than the first, all but one of a hundred than the second: "3.1/18" */
export function timesOf({ p50Ms, p99Ms }: WayResult): string {
  const shown = (ms: number): string => (ms < 10 ? ms.toFixed(1) : String(Math.round(ms)));
  return p50Ms === undefined || p99Ms === undefined ? "" : `${shown(p50Ms)}/${shown(p99Ms)}`;
}

export interface Next {
  /** What to read or run, and why. */
  readonly more: readonly (readonly [what: string, why: string])[];
  /** The same on code of one's own. */
  readonly own: { readonly why: string; readonly command: string };
}

/** In a checkout, its files. */
export function whatNext(inCheckout: boolean, only: readonly RaceName[]): Next {
  if (!inCheckout)
    return {
      more: [
        ["npm install holdfast", "and its README: how to put it into your code"],
        ["npx @holdfast/cli choose", "three questions, and the code that answers them"],
      ],
      own: {
        why: "Find such a race in your own code (`race --help` shows such a file)",
        command: "npx @holdfast/cli race upload.race.ts",
      },
    };
  const pages: Readonly<Record<RaceName, readonly [string, string]>> = {
    quota: ["docs/quota.md", "quotas and credits, in one round trip"],
    "last-item": ["docs/stock.md", "stock that is never oversold"],
    transfers: ["docs/rows.md", "row locks that cannot deadlock"],
    jobs: ["docs/queue.md", "jobs in the same database"],
    cron: ["docs/schedules.md", "each tick once, on any number of instances"],
  };
  return {
    more: [
      ["README.md", "how to put it into your code"],
      ["docs/choose.md", "a lock, a constraint, SERIALIZABLE: which one when"],
      ...only.map((name) => pages[name]),
      ["docs/races.md", "tests that find such races"],
    ],
    own: {
      why: "Find such a race in your own code: put your function into a copy of this file",
      command: "npm run race examples/race/scenarios.ts",
    },
  };
}
