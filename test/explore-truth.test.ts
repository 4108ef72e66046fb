/**
 * What `explore` says of small random programs, compared with what brute force finds: no false green, no false alarm, and every outcome
 * that there is. HOLDFAST_SEED, and HOLDFAST_PROGRAM for one of them, bring a program back; HOLDFAST_PROGRAMS and
 * HOLDFAST_PROGRAM_MINUTES say how many there are, and for how long.
 */
import { afterAll, beforeAll, beforeEach, describe, expect, inject, test } from "vitest";
import { unavailable } from "./harness/databases.ts";
import { type EngineName, abilities, generate } from "./harness/truth/generate.ts";
import type { Ground } from "./harness/truth/ground.ts";
import { onMysql } from "./harness/truth/mysql.ts";
import { onPostgres } from "./harness/truth/postgres.ts";
import { type Program, programText } from "./harness/truth/program.ts";
import { onSqlite } from "./harness/truth/sqlite.ts";
import { shrunk } from "./harness/truth/shrink.ts";
import { type Explored, type Truth, explored, judge, truthOf } from "./harness/truth/verdict.ts";

const long = process.env["HOLDFAST_LONG"] === "1";
const given = (name: string) => (process.env[name] === undefined ? undefined : Number(process.env[name]));
const only = given("HOLDFAST_PROGRAM");
/** Of all programs, those with a race at least; others are left out until it is so. */
const wantedRaces = 0.36;
const leastRaces = 1 / 3;
/** Those of which the explorer may say that it has not tried everything. */
const mostDoubts = 1 / 4;
/** Of fewer, a share says nothing. */
const enough = 30;
/** `npm test` draws the same programs each time; longer runs draw others. */
const seed = long || process.env["HOLDFAST_SEED"] !== undefined ? inject("seed") : 81;
/** However little time there is. */
const leastPrograms = 5;
/** Interleavings of one program. */
const mostRuns = long ? 200 : 40;
/** One in so many is explored without pruning too. */
const unprunedEach = long ? 10 : 20;
/** Programs that are judged wrongly, after which there is no use in going on. */
const mostWrong = 5;
const shrinkMs = 20_000;

interface Engine {
  readonly name: EngineName;
  /** Without HOLDFAST_LONG. */
  readonly programs: number;
  readonly minutes: number;
  open(): Promise<Ground>;
  why(): string | undefined;
}

const engines: readonly Engine[] = [
  {
    name: "postgres",
    programs: 80,
    minutes: 1,
    open: onPostgres,
    why: () => unavailable("postgres"),
  },
  {
    name: "mysql",
    programs: 50,
    minutes: 1,
    open: () => onMysql("mysql"),
    why: () => unavailable("mysql"),
  },
  {
    name: "mariadb",
    programs: 70,
    minutes: 1,
    open: () => onMysql("mariadb"),
    why: () => unavailable("mariadb"),
  },
  { name: "sqlite", programs: 100, minutes: 1, open: onSqlite, why: () => undefined },
];

class Tally {
  readonly #counts = new Map<string, number>();

  add(what: string): void {
    this.#counts.set(what, (this.#counts.get(what) ?? 0) + 1);
  }

  get sum(): number {
    return [...this.#counts.values()].reduce((all, each) => all + each, 0);
  }

  get text(): string {
    return [...this.#counts].map(([what, count]) => `${count} ${what}`).join("; ");
  }
}

/** All programs of one engine, and what came of them. */
class Campaign {
  readonly #engine: EngineName;
  readonly #ground: Ground;
  readonly #seed: number;
  readonly #leftOut = new Tally();
  /** Why green reports did not say "exhaustive". */
  readonly doubts = new Tally();
  /** What is printed of programs that were judged wrongly. */
  readonly wrong: string[] = [];
  wrongs = 0;
  programs = 0;
  /** By brute force. */
  races = 0;
  #found = 0;
  #green = 0;
  #runs = 0;
  #ms = { truth: 0, explorer: 0 };

  constructor(engine: EngineName, ground: Ground, seed: number) {
    this.#engine = engine;
    this.#ground = ground;
    this.#seed = seed;
  }

  async run(index: number): Promise<void> {
    const program = generate(abilities[this.#engine], this.#seed, index, long ? "large" : "small");
    const begun = performance.now();
    const truth = await truthOf(this.#ground, program, mostRuns);
    const known = performance.now();
    this.#ms.truth += known - begun;
    if (only !== undefined) console.log(programText(program), truth);
    if (typeof truth === "string") return this.#leftOut.add(truth);
    if (truth.races.length > 0) this.races++;
    // Most of what is drawn has none.
    else if (this.programs + 1 > this.races / wantedRaces && only === undefined)
      return this.#leftOut.add("another one without a race");
    this.programs++;
    const first = await explored(this.#ground, program, truth.allowed);
    const { wrong, doubt } = this.#judge(program, truth, "explored", first);
    if (wrong !== undefined) await this.#shrink(program);
    if (only !== undefined) console.log(first.report?.text ?? first.error);
    if (doubt !== undefined) this.doubts.add(doubt);
    else if (wrong === undefined && first.report?.ok) this.#green++;
    else if (wrong === undefined) this.#found++;
    if (wrong === undefined) await this.#everything(program, truth, first);
    this.#ms.explorer += performance.now() - known;
  }

  /** Every outcome, whether it is a race or not, with and without pruning. */
  async #everything(program: Program, truth: Truth, { report }: Explored): Promise<void> {
    const all = { ...truth, races: [] };
    const ground = this.#ground;
    // One that found a race has left the others.
    if (!report?.ok) this.#judge(program, all, "every outcome", await explored(ground, program, undefined));
    if (only === undefined && program.index % unprunedEach > 0) return;
    // Without pruning, these are too many.
    if (program.faults.length > 0 || Object.keys(program.actors).length > 2) return;
    const unpruned = await explored(ground, program, undefined, { prune: false });
    this.#judge(program, all, "every outcome, without pruning", unpruned);
  }

  async #shrink(program: Program): Promise<void> {
    const isWrong = async (smaller: Program) => {
      const truth = await truthOf(this.#ground, smaller, mostRuns);
      if (typeof truth === "string") return false;
      return judge(truth, await explored(this.#ground, smaller, truth.allowed)).wrong !== undefined;
    };
    const smallest = await shrunk(program, isWrong, shrinkMs);
    const text = `the smallest that goes wrong:\n${programText(smallest)}`;
    this.wrong.push(text);
    console.log(text);
  }

  #judge(program: Program, truth: Truth, what: string, of: Explored): ReturnType<typeof judge> {
    this.#runs += of.report?.runs ?? 0;
    const judgement = judge(truth, of);
    if (judgement.wrong !== undefined) {
      this.wrongs++;
      this.wrong.push(
        `${long ? "HOLDFAST_LONG=1 " : ""}HOLDFAST_SEED=${this.#seed} HOLDFAST_PROGRAM=${program.index} on ${this.#engine}, ${what}\n${programText(program)}\n${judgement.wrong}`,
      );
      console.log(this.wrong.at(-1));
    }
    return judgement;
  }

  get text(): string {
    const seconds = (ms: number) => `${(ms / 1000).toFixed(1)} s`;
    return [
      `HOLDFAST_SEED=${this.#seed} ${this.#engine}: ${this.programs} programs, ${this.races} with a race`,
      `${this.#found} races found, ${this.#green} green, ${this.doubts.sum} not exhaustive, ${this.wrongs} wrong`,
      `not exhaustive: ${this.doubts.text || "none"}`,
      `not tried: ${this.#leftOut.text || "none"}`,
      `brute force ${seconds(this.#ms.truth)}, explorer ${seconds(this.#ms.explorer)} in ${this.#runs} runs`,
    ].join("\n  ");
  }
}

/** Every order is another outcome: where pruning leaves out too much of a table, this shows it. */
function dense(of: string, value: string, change: (nth: number) => string): Program {
  const actor = (...texts: string[]) => ({
    body: texts.map((text) => ({ do: "send", text }) as const),
    returns: "all" as const,
    prepared: false,
  });
  const read = (nth: number) => `SELECT ${nth}, ${value} FROM ${of}`;
  return {
    index: 0,
    tables: ["f", "t", "u", "l"],
    rows: ["INSERT INTO t VALUES (1, 3)", "INSERT INTO u VALUES (1, 3)"],
    actors: { A: actor(change(1), change(2), read(3)), B: actor(read(1), read(2), read(3)) },
    faults: [],
    once: true,
    mayGiveUp: false,
  };
}

const densePrograms: Readonly<Record<string, Program>> = {
  t: dense("t", "n", (nth) => `UPDATE t SET n = n + ${nth} WHERE id = 1`),
  u: dense("u", "n", (nth) => `UPDATE u SET n = n + ${nth} WHERE id = 1`),
  l: dense("l", "count(*)", (nth) => `INSERT INTO l VALUES (${nth})`),
};

describe.each(engines)("random programs on $name", ({ name, programs, minutes, open, why }) => {
  const most = given("HOLDFAST_PROGRAMS") ?? (long ? 10_000 : programs);
  const ms = 60_000 * (given("HOLDFAST_PROGRAM_MINUTES") ?? (long ? 240 : minutes));
  let ground: Ground;
  beforeAll(async () => {
    if (why() === undefined) ground = await open();
  });
  beforeEach(({ skip }) => skip(why() !== undefined, why()));
  afterAll(() => ground?.close());

  test.for(Object.keys(densePrograms))("every order on %s is another outcome", async (table) => {
    const program = densePrograms[table] as Program;
    const truth = await truthOf(ground, program, 200);
    if (typeof truth === "string") throw new Error(truth);
    expect(truth.outcomes.size).toBeGreaterThan(8);
    const everything = { ...truth, races: [] };
    expect(judge(everything, await explored(ground, program, undefined))).toEqual({});
  });

  test("are judged as brute force judges them", { timeout: ms + 180_000 }, async () => {
    const campaign = new Campaign(name, ground, seed);
    const until = performance.now() + ms;
    if (only !== undefined) await campaign.run(only);
    else
      for (let index = 0; campaign.programs < most; index++) {
        if (performance.now() > until && campaign.programs >= leastPrograms) break;
        await campaign.run(index);
        if (campaign.wrongs >= mostWrong) break;
      }
    console.log(campaign.text);
    expect(campaign.wrong.join("\n\n")).toBe("");
    if (only !== undefined) return;
    expect(campaign.races / campaign.programs).toBeGreaterThan(leastRaces);
    if (campaign.programs >= enough) expect(campaign.doubts.sum / campaign.programs).toBeLessThan(mostDoubts);
  });
});
