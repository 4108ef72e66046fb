/** What processes were told, while some of them were killed and connections cut, can be explained one after the other. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import {
  type History,
  type Model,
  type Operation,
  checkHistory,
  models,
  readHistory,
} from "holdfast/testing";
import { Pool } from "pg";
import { beforeAll, beforeEach, describe, expect, inject, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";
import { type StressArg, type StressKind, leaseTtl, limit } from "./workers/history-stress.ts";

const worker = new URL("./workers/history-stress.ts", import.meta.url);
const seed = inject("seed");
const processes = 4;
const callers = 2;

const schema = `
  CREATE TABLE quota (id text PRIMARY KEY, used int NOT NULL);
  CREATE TABLE doc (id text PRIMARY KEY, value text, version int NOT NULL DEFAULT 0, fence int NOT NULL DEFAULT 0);
  CREATE TABLE effect (id text NOT NULL, answer text NOT NULL)`;

interface Case {
  readonly kind: StressKind;
  readonly model: Model<any>;
  readonly keys: readonly string[];
  /** Of each life of a process. */
  readonly calls: number;
}

const named = (kind: StressKind, count: number) => Array.from({ length: count }, (_, i) => `${kind}-${i}`);

const cases: Case[] = [
  { kind: "counter", model: models.counter({ limit }), keys: named("counter", 2), calls: 150 },
  { kind: "lock", model: models.lock(), keys: named("lock", 2), calls: 100 },
  { kind: "lease", model: models.fencedRegister({ ttl: leaseTtl }), keys: named("lease", 3), calls: 60 },
  { kind: "version", model: models.versioned(), keys: named("version", 2), calls: 150 },
  { kind: "once", model: models.once(), keys: named("once", 40), calls: 150 },
];

/**
 * With a connection the server gives back what was held on it: nobody calls that. Of those that could not release what
 * they held, it may have been so at any time after the first kill or cut since they asked for it.
 */
function losses(history: History, times: readonly number[]): Operation[] {
  const owner = ({ input }: Operation) => (input as { owner?: string } | undefined)?.owner ?? "";
  const released = new Set(
    history.filter(({ call, outcome }) => call === "release" && outcome === "returned").map(owner),
  );
  return history
    .filter((each) => each.call === "acquire" && each.key.startsWith("lock") && !released.has(owner(each)))
    .flatMap(({ key, input, start }): Operation[] => {
      const at = times.find((time) => time >= start);
      if (at === undefined) return [];
      const loss = { process: "server", key, call: "release", input, output: undefined } as const;
      return [{ ...loss, outcome: "unknown", start: at, end: Infinity }];
    });
}

interface Told {
  readonly history: History;
  readonly killed: number;
  readonly cuts: number;
}

async function prepare(url: string): Promise<void> {
  const pool = new Pool({ connectionString: url });
  try {
    await holdfast(fromPg(pool)).migrate();
    await pool.query(schema);
    for (const key of cases.flatMap(({ keys }) => keys)) {
      await pool.query("INSERT INTO quota VALUES ($1, 0)", [key]);
      await pool.query("INSERT INTO doc (id) VALUES ($1)", [key]);
    }
  } finally {
    await pool.end();
  }
}

/** All kinds at once: processes take longer to start than to do this. */
async function run(naive: boolean): Promise<Told> {
  const database = await createDatabase("postgres");
  const folder = await mkdtemp(join(tmpdir(), "holdfast-history-"));
  const proxy = await startProxy({ port: Number(new URL(database.url).port) });
  const next = random(seed);
  const files: string[] = [];
  const times: number[] = [];
  const note = () => times.push(Number(process.hrtime.bigint()));
  let killed = 0;
  let ready = 0;
  // None is cut while a process asks the server what it can do.
  let starting = processes;
  const all = Promise.withResolvers<void>();

  const live = async (index: number, life: number, dies: boolean): Promise<void> => {
    const name = `p${index}${life > 0 ? `.${life}` : ""}`;
    const file = join(folder, `${name}.jsonl`);
    const kinds = cases.map(({ kind, keys, calls }) => ({ kind, keys, calls: naive ? 40 : calls }));
    const url = proxy.url(database.url);
    const arg: StressArg = {
      url,
      file,
      process: name,
      seed: seed + index * 100 + life,
      callers,
      kinds,
      naive,
    };
    const started = startWorker(worker, arg);
    try {
      await started.message("ready");
      files.push(file);
      // Processes take a second to start: together, or the first would be done before the last has begun.
      if (life === 0 && ++ready === processes) all.resolve();
      await all.promise;
      starting--;
      started.send("go");
      if (!dies) {
        await started.result;
        return;
      }
      await sleep(150 + next() * 400);
      note();
      started.sigkill();
      if ((await started.exited).signal === "SIGKILL") killed++;
    } finally {
      started.sigkill();
    }
  };

  try {
    await prepare(database.url);
    proxy.cutWhen((direction) => {
      if (naive || starting > 0 || direction !== "to-server" || next() > 0.002) return "pass";
      note();
      // Before the statement gets there, or after it was done: a COMMIT among them.
      return next() < 0.5 ? "cut-before" : "drop-answer";
    });
    const one = async (index: number): Promise<void> => {
      // The last one lives, so that there is always somebody who goes on.
      const dies = !naive && index < processes - 1;
      await live(index, 0, dies);
      if (!dies) return;
      starting++;
      await live(index, 1, false);
    };
    await Promise.all(Array.from({ length: processes }, (_, i) => one(i)));
    const history = readHistory(...files);
    return { history: [...history, ...losses(history, times)], killed, cuts: proxy.cuts };
  } finally {
    await proxy.close();
    await database.drop();
    await rm(folder, { recursive: true, force: true });
  }
}

function partOf({ history }: Told, { keys, model }: Case) {
  return checkHistory(
    history.filter(({ key }) => keys.includes(key)),
    model,
  );
}

const reason = unavailable("postgres");

describe(`4 processes, 3 of them killed and started again, connections cut (seed ${seed})`, () => {
  let told: Told;
  beforeAll(async () => {
    if (reason === undefined) told = await run(false);
  });
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test("they were, and some calls were never heard of again", () => {
    expect(told.killed).toBe(3);
    expect(told.cuts).toBeGreaterThan(0);
    expect(told.history.filter(({ outcome }) => outcome === "unknown").length).toBeGreaterThan(0);
  });

  test.for(cases)("what they were told is linearizable: $kind", (each) => {
    const report = partOf(told, each);
    console.log(`${each.kind}: ${report.text}; ${told.killed} killed, ${told.cuts} connections cut`);
    expect(report.verdict, `seed ${seed}\n${report.text}`).toBe("ok");
    expect(report.operations).toBeGreaterThan(200);
  });
});

// The same must show the bugs of what people write, or it would prove nothing.
describe(`4 processes that look, then write (seed ${seed})`, () => {
  let told: Told;
  beforeAll(async () => {
    if (reason === undefined) told = await run(true);
  });
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test.for(cases)("what they were told is not linearizable: $kind", (each) => {
    const report = partOf(told, each);
    expect(report.verdict, `seed ${seed}\n${report.text}`).toBe("violation");
    expect(report.counterexample?.text).toContain("cannot be explained");
  });
});
